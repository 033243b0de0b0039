"""The tests of the attention kernels notice mistakes: each one of planted.py, in sources that are otherwise the same.

The tests that must fail are those that pass on the sources as they are.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import test_decode
import test_extend
import test_poison
from attention import USUAL
from helpers import one_thread  # noqa: F401
from machines import patched_sources
from planted import BUGS, MFMA, MMA, MMAC

from sglang_quantkv.kernels import build
from sglang_quantkv.kernels.targets import find_target


def ordinary_tests(bug):
    """The ordinary tests of the bug's module, by name."""
    case = {"config": bug.config, "machine": bug.machine}
    phase = {"decode": test_decode, "extend": test_extend}[bug.phase]
    yield "float64", partial(phase.test_agrees_with_float64, **case)
    yield "poison", partial(test_poison.test_poison_beside_live_tokens_changes_no_bit, phase=bug.phase, **case)
    for operand in ("keys", "values"):
        rows = partial(test_poison.test_a_row_that_is_not_finite, phase=bug.phase, operand=operand, **case)
        yield f"{operand} that are not finite", partial(rows, window_left=8)
    yield "order of lanes", partial(phase.test_the_order_of_lanes_changes_no_bit, **case)


@pytest.fixture(scope="module")
def sources(request, tmp_path_factory):
    """``sources(bug)``: the folder with its patched sources. The selected bugs' modules are built side by side."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path and "[" in item.name]
    chosen = [param["bug"] for param in params]
    roots = {bug: plant(bug, tmp_path_factory.mktemp("planted")) for bug in chosen}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = {
            bug: pool.submit(build.build_module, bug.config.unit(bug.phase), bug.machine.target, root)
            for bug, root in roots.items()
        }
        yield lambda bug: built[bug].result() and roots[bug]


def plant(bug, folder):
    def patch(text):
        assert text.count(bug.old) == 1, f"{bug.file} holds {text.count(bug.old)} times: {bug.old}"
        return text.replace(bug.old, bug.new)

    return patched_sources(folder, bug.file, patch)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_is_noticed(bug, sources, monkeypatch, measured):
    root = sources(bug)

    def find_function(name, phase, recipe, head_dim, page_size, target):
        unit = build.Unit(phase, recipe, head_dim, page_size)
        assert unit == bug.config.unit(bug.phase)
        return getattr(build.load(unit, find_target(target), root), name)

    monkeypatch.setattr(f"sglang_quantkv.kernels.{bug.phase}.find_function", find_function)
    for name, test in ordinary_tests(bug):
        try:
            test()
        except (AssertionError, RuntimeError) as error:
            measured(f"planted: {bug}: {name}: {str(error).splitlines()[0][:90]}")
            return
    pytest.fail("no test fails")


def test_the_same_tests_run_on_unpatched_sources():
    assert all(bug.config in USUAL and bug.machine in (MMA, MFMA, MMAC) for bug in BUGS)
