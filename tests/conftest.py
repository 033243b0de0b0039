"""Fixtures that cost a lot, made once: the demo model and the servers.

What they need is imported where it is used, so that kernels are tested on machines without SGLang.
"""

from __future__ import annotations

import pytest

_measured: list[str] = []


@pytest.fixture(scope="session")
def measured():
    """``measured(line)``: a figure that the run's summary prints."""
    return _measured.append


def pytest_terminal_summary(terminalreporter):
    if _measured:
        terminalreporter.section("measured")
        for line in _measured:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def demo_model():
    """The Hugging Face folder of the demo model, converted on first use."""
    from sglang_quantkv.demo import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="session")
def serve(demo_model, tmp_path_factory):
    """``serve(flags)``: a running server of the demo model with these flags."""
    from server import Servers

    servers = Servers(demo_model, tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture(scope="session", autouse=True)
def start_servers_ahead(request):
    """Tests of servers come last; the first servers start now, beside the tests before them."""
    files = {item.path.name: item.module for item in request.session.items}
    if "test_server.py" in files:
        servers = request.getfixturevalue("serve")
        for flags in files["test_server.py"].STARTED_FIRST:
            servers.start(flags)
