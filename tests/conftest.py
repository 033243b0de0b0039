"""Fixtures that cost a lot, made once: the demo model and the servers."""

from __future__ import annotations

import pytest
from server import Server

from sglang_quantkv.demo import demo_model_path


@pytest.fixture(scope="session")
def demo_model():
    """The Hugging Face folder of the demo model, converted on first use."""
    return demo_model_path()


@pytest.fixture(scope="session")
def serve(demo_model, tmp_path_factory):
    """``serve(*flags)``: a running server of the demo model with these flags, shared by all who ask for the same."""
    running: dict[tuple[str, ...], Server] = {}

    def get(*flags: str) -> Server:
        if flags not in running:
            running[flags] = Server(demo_model, flags, tmp_path_factory.mktemp("server") / "log")
        return running[flags]

    yield get
    for server in running.values():
        server.stop()
