"""Bytes that no query may see change no bit of any output, and rows that are not finite only those that see them."""

from __future__ import annotations

import pytest
import torch
from attention import USUAL, Case, Problem, decode, extend, runs
from helpers import one_thread  # noqa: F401
from machines import Machine, build_ahead

PHASES = {"decode": decode, "extend": extend}
each_phase = pytest.mark.parametrize("phase", PHASES)
BAD = (torch.nan, torch.inf, -torch.inf)
PREFIX = 70


@pytest.fixture(scope="module", autouse=True)
def built(request):
    for phase in PHASES:
        build_ahead(request, phase)


@runs()
@each_phase
def test_poison_beside_live_tokens_changes_no_bit(config, machine, phase):
    """Slots of nobody, page 0, padding and unused entries of the page table: against a pool of zeros."""
    features = {"window_left": 50, "softcap": 3.0, "sinks": True}
    for options in ({}, features):
        for q_len, group in ((1, 4), (1, 9), (3, 3)):
            q_lens = (q_len, q_len if phase == "decode" else 0, q_len, q_len, q_len)
            case = Case((100, 0, 64, 3, 190), q_lens, group=group, kv_heads=2, **options)
            poisoned, clean = (PHASES[phase](Problem(config, case, poison=p), machine) for p in (True, False))
            assert clean.isfinite().all() and torch.equal(poisoned, clean)


def check_who_sees(problem: Problem, changed: tuple, phase: str, machine: Machine, sees: torch.Tensor) -> None:
    """With an element that is not finite, outputs ``sees [query tokens, Hq]`` are not finite, and the others have the
    bits that they have with a normal element."""
    normal = PHASES[phase](problem.changed(*changed, 1.0), machine)
    assert normal.isfinite().all()
    for value in BAD:
        got = PHASES[phase](problem.changed(*changed, value), machine)
        assert torch.equal(got.isnan().all(-1), sees) and got[~sees].isfinite().all(), value
        assert torch.equal(got[~sees], normal[~sees]), value


@runs(USUAL, "emulated_mma", "emulated_mfma", "emulated_mmac")
@each_phase
@pytest.mark.parametrize("operand", ("keys", "values"))
@pytest.mark.parametrize("window_left", (-1, 8))
def test_a_row_that_is_not_finite(config, machine, phase, operand, window_left):
    """It shows in the queries that see it: not in earlier ones, nor behind their windows, nor in another request, nor
    in the other KV head."""
    for group, q_len in ((1, 8), (5, 8), (3, 1)) if phase == "decode" else ((5, 40),):
        length = PREFIX + q_len
        case = Case((length, 50, length), (q_len,) * 3, group=group, kv_heads=2, window_left=window_left)
        problem = Problem(config, case)
        for position in sorted({0, PREFIX - 1, PREFIX, PREFIX + q_len // 2, length - 1}):
            sees = torch.zeros(3 * q_len, 2 * group, dtype=torch.bool)
            sees[:q_len, group:] = problem.visible(0)[:, position, None]
            check_who_sees(problem, (operand, 0, (position, 1, 37)), phase, machine, sees)


@runs(USUAL, "emulated_mma", "emulated_mfma")
def test_a_row_of_a_tree_that_is_not_finite(config, machine):
    problem = Problem(config, Case((PREFIX + 8, 8), (8, 8), group=2, tree=True))
    for position in range(PREFIX, PREFIX + 8):
        sees = torch.zeros(16, 2, dtype=torch.bool)
        sees[:8] = problem.visible(0)[:, position, None]
        check_who_sees(problem, ("values", 0, (position, 0, 3)), "decode", machine, sees)


@runs(USUAL, "emulated_mma", "emulated_mfma")
@each_phase
def test_a_query_that_is_not_finite(config, machine, phase):
    for group, q_len in ((1, 1), (4, 1), (3, 5)):
        problem = Problem(config, Case((PREFIX, PREFIX), (q_len, q_len), group=group, kv_heads=2))
        sees = torch.zeros(2 * q_len, 2 * group, dtype=torch.bool)
        sees[-1, group] = True
        check_who_sees(problem, ("queries", 1, (q_len - 1, group, 9)), phase, machine, sees)
