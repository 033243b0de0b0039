"""Attention whose answer is known beforehand: means, constants and single tokens, without any tolerance to speak of.

Values lie on the grid of every format, with scales that are powers of two, so that quantization keeps them, and every
row has the largest magnitude there is, so that equal probabilities stay equal as int8 codes.
"""

from __future__ import annotations

import pytest
import torch
from attention import USUAL, Case, Problem, check, decode, extend, row_errors, runs
from helpers import one_thread  # noqa: F401
from machines import build_ahead

from sglang_quantkv.formats import INT8
from sglang_quantkv.reference import fake_quantize

PHASES = {"decode": decode, "extend": extend}
GROUPS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 24)
everywhere = runs(USUAL, "emulated_mma", "emulated_mfma", "emulated_mfma_wide", "emulated_mmac")
each_phase = pytest.mark.parametrize("phase", PHASES)


@pytest.fixture(scope="module", autouse=True)
def built(request):
    for phase in PHASES:
        build_ahead(request, phase)


def grid_rows(config, *shape: int, seed: int = 0) -> torch.Tensor:
    """Rows whose elements every format keeps."""
    random = torch.Generator().manual_seed(seed)
    if config.recipe == "int8":  # integers up to 127
        rows = torch.randint(-127, 128, (*shape, config.head_dim), generator=random).float()
        rows[..., 0] = 127.0
        return rows / 32
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 8, (*shape, config.head_dim), generator=random)
    rows = magnitudes[codes] * (torch.randint(0, 2, codes.shape, generator=random) * 2 - 1)
    rows[..., ::32] = 6.0
    return rows


def signs(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


def mean_of(values: torch.Tensor, window_left: int) -> torch.Tensor:
    return values.double()[-(window_left + 1) :].mean(0) if window_left >= 0 else values.double().mean(0)


@everywhere
@each_phase
def test_the_mean_of_equal_keys(config, machine, phase):
    for length, window_left in ((256, -1), (4096, -1), (333, -1), (1000, 100), (70, 0)):
        keys = signs(1, 2, config.head_dim).expand(length, -1, -1)
        values = grid_rows(config, length, 2)
        case = Case((length,), (1,), group=3, kv_heads=2, window_left=window_left, dtype=torch.float16)
        got = PHASES[phase](Problem(config, case, keys=[keys], values=[values]), machine)
        expected = mean_of(values, window_left).repeat_interleave(3, 0)[None]
        # Half an ulp of fp16; float32 sums of values up to 6.
        torch.testing.assert_close(got.double(), expected, rtol=2**-11, atol=4e-6)


@everywhere
@each_phase
def test_constants_of_kv_heads(config, machine, phase):
    """Every query head reads its own KV head, whatever the group."""
    constants = torch.tensor([0.5, 1, 2, 4, -4])
    for group in GROUPS:
        for q_len in (1, 3):
            case = Case((100, 5, 64), (q_len,) * 3, group=group, kv_heads=5)
            keys = [torch.ones(n, 5, config.head_dim) for n in case.lengths]
            values = [constants.view(1, -1, 1).expand(n, -1, config.head_dim) for n in case.lengths]
            problem = Problem(config, case, keys=keys, values=values)
            _, cached = problem.cache.read(problem.slots[0][:1])
            expected = cached[0, :, 0].to(torch.bfloat16).repeat_interleave(group)
            got = PHASES[phase](problem, machine)
            assert torch.equal(got, expected.view(1, -1, 1).expand_as(got)), (group, q_len)


@everywhere
@each_phase
def test_one_token_has_all_the_weight(config, machine, phase):
    """Each query head looks for a key of its own: the answer is that token's row."""
    for length in (1, 64, 65, 257, 600):
        for group in GROUPS:
            found = torch.randint(0, length, (group,), generator=torch.Generator().manual_seed(group))
            found[0], found[-1] = 0, length - 1
            wanted = signs(group, 1, config.head_dim, seed=group)
            if length == 1:
                wanted[:] = wanted[:1]
            keys = torch.zeros(length, 1, config.head_dim)
            keys[found] = 10 * wanted
            # A token that two heads looked for holds the key of only one of them.
            queries = (keys[found] / 10).transpose(0, 1)
            values = grid_rows(config, length, 1)
            case = Case((length,), (1,), group=group)
            problem = Problem(config, case, keys=[keys], values=[values], queries=[queries])
            got = PHASES[phase](problem, machine)
            # Other tokens' weights are e^-30 at most. With an MXFP4 V a zero weight gets the bits of its block's scale
            # for an exponent, which makes it 2^-37 on 64 lanes: together with 600 values up to 6, 3e-8.
            torch.testing.assert_close(got[0].float(), values[found, 0], rtol=0, atol=3e-8)


@everywhere
@each_phase
def test_extreme_scores(config, machine, phase):
    """Scores of 1e4 and -1e4: the one key that fits wins; where none does, all are equal."""
    length, found = 200, 130
    direction = signs(1, 1, config.head_dim)
    values = grid_rows(config, length, 1)
    magnitude = (1e4 * config.head_dim**-0.5) ** 0.5
    for group in (1, 8, 9):
        queries = (direction * magnitude).expand(1, group, -1)
        for hot in (True, False):
            keys = (-direction * magnitude).repeat(length, 1, 1)
            if hot:
                keys[found] *= -1
            problem = Problem(
                config, Case((length,), (1,), group=group), keys=[keys], values=[values], queries=[queries]
            )
            got = PHASES[phase](problem, machine)
            expected = values[found] if hot else values.mean(0)
            torch.testing.assert_close(got[0].float(), expected.expand_as(got[0]), rtol=2**-8, atol=4e-6)


@everywhere
@each_phase
def test_outlier_channels(config, machine, phase):
    """Keys and values with two channels 50 times as large as the others, and queries that hardly use them, as trained
    models have them. Two terms lose nothing. One rounds the queries to int8, which such keys magnify; beyond that,
    errors are as always."""
    length, group = 300, 2
    random = torch.Generator().manual_seed(3)
    size = torch.ones(config.head_dim)
    size[[3, 40]] = 50.0
    keys, values = (torch.randn(length, 1, config.head_dim, generator=random) * size for _ in range(2))
    queries = torch.randn(1, group, config.head_dim, generator=random) / size
    problem = Problem(config, Case((length,), (1,), group=group), keys=[keys], values=[values], queries=[queries])
    got = PHASES[phase](problem, machine)
    if phase == "extend":
        shape = (-1, config.head_dim if config.recipe in ("int8", "k8v4") else 32)  # elements that share a scale
        problem.queries = [fake_quantize(q.unflatten(-1, shape), INT8).flatten(-2) for q in problem.queries]
    problem.expected = problem.expected / size  # every channel counts alike
    if phase == "extend" and config.recipe == "int8":
        # Steps of int8 probabilities are 1/127 of the largest product with V's scales, which here differ by tokens.
        assert row_errors(got / size, problem.expected).max() < 6e-2
    else:
        check(problem, got / size, two_terms=phase == "decode")
