"""Decode and verify against float64 attention to what the cache holds, on every map of a matrix unit."""

from __future__ import annotations

import functools

import pytest
import torch
from attention import ORDERS, USUAL, Case, Problem, check, decode, has_two_terms, runs
from helpers import one_thread  # noqa: F401
from machines import Config, build_ahead

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.decode import decode_layout
from sglang_quantkv.kernels.targets import Target

LENGTHS = (1, 9, 31, 33, 63, 64, 65, 255, 256, 257, 503, 1001)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24)
RAGGED = (130, 0, 65, 300, 0, 31)


@pytest.fixture(scope="module", autouse=True)
def built(request):
    build_ahead(request, "decode")


def batch(*lengths: int, q_len: int = 1, **features) -> Case:
    return Case(lengths, (q_len,) * len(lengths), **features)


FEATURES = [
    {"window_left": window_left, "softcap": softcap, "sinks": sinks}
    for window_left in (-1, 100)
    for softcap in (0.0, 2.0)
    for sinks in (False, True)
]


def cases(page_size: int) -> dict[str, Case]:
    found = {}
    for i, length in enumerate(LENGTHS):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        found[f"length {length}"] = batch(length, group=(1, 4, 8)[i % 3], kv_heads=1 + i % 2, dtype=dtype)
    for i, group in enumerate(GROUPS):
        found[f"group {group}"] = batch(*RAGGED, group=group, kv_heads=1 + i % 3)
    for q_len in range(2, 9):
        for tree in (False, True):
            group = 1 + (3 * q_len + tree) % 5
            found[f"{q_len} tokens, tree {tree}"] = batch(9, 0, 65, 257, q_len=q_len, group=group, tree=tree)
    for i, features in enumerate(FEATURES):
        found[f"{features}"] = batch(*RAGGED, group=(1, 3, 8)[i % 3], kv_heads=2, dtype=torch.float16, **features)
        # Trees, the window too: a token's place is that of its depth.
        found[f"tree, {features}"] = batch(200, 0, 70, 8, q_len=7, group=1 + i % 3, tree=True, **features)
    for window_left in (0, 1, 31, 62, 63, 64, 65, 127, 300):
        found[f"window {window_left}"] = batch(500, 64, 65, 0, 20, group=2, window_left=window_left)
        found[f"window {window_left}, 3 tokens"] = batch(260, 64, 3, q_len=3, group=2, window_left=window_left)
    for prefix in (0, page_size):
        lengths = range(prefix + 1, prefix + page_size + 1)
        found[f"lengths from {prefix} on"] = batch(*lengths, group=1, dtype=torch.float16)
    return found


@functools.lru_cache(maxsize=1)  # tests of one config follow one another, and all configs together take gigabytes
def problems(config: Config) -> dict[str, Problem]:
    return {name: Problem(config, case, seed=i) for i, (name, case) in enumerate(cases(config.page_size).items())}


@runs()
def test_agrees_with_float64(config, machine):
    for i, (name, problem) in enumerate(problems(config).items()):
        order = ORDERS[i % 3]
        got = decode(problem, machine, order)
        check(problem, got, has_two_terms(machine, problem.case.rows), f"{name}, lanes in {order} order")


@runs(USUAL, "emulated_mma", "emulated_mfma", "emulated_mmac", on_gpu=False)
def test_the_order_of_lanes_changes_no_bit(config, machine):
    for problem in list(problems(config).values())[::4]:
        forward, *others = (decode(problem, machine, order) for order in ORDERS)
        assert all(torch.equal(forward, other) for other in others)


@runs(USUAL, "emulated_mma", "emulated_mfma")
def test_many_segments(config, machine):
    """More segments than workers, and requests that share a worker with their neighbours."""
    problem = Problem(config, batch(*range(1, 40), 0, 0, 129, group=3, kv_heads=4))
    check(problem, decode(problem, machine), two_terms=True)


def test_pages_that_do_not_fit_are_refused():
    """A page of 128 tokens at head_dim 256 is a tile of 65 KiB: more than the shared memory of a 64-lane unit."""
    cache = Config("int8", 256, 128).cache()
    with pytest.raises(UnsupportedConfig, match="pages of 128 tokens at head_dim 256 on emulated_mfma.*page-size 64"):
        decode_layout(cache, 1, target=Target("emulated_mfma"))


@runs(USUAL, "emulated_mma")
def test_error_of_quantization(config, machine, measured):
    """Kernel and format together, against float64 attention to the tensors before quantization."""
    problem = Problem(config, batch(1001, 700, 300, group=4, kv_heads=2, dtype=torch.float16))
    errors = [
        float((x.double() - problem.unquantized).norm() / problem.unquantized.norm())
        for x in (decode(problem, machine), problem.expected)
    ]
    measured(f"decode {config} on {machine}: {errors[0]:.2%} from unquantized attention, the format {errors[1]:.2%}")
    assert errors[0] <= 1.05 * errors[1]  # two terms: what the kernel adds is small beside the format's error
