"""Extend against float64 attention to what the cache holds, on every map of a matrix unit."""

from __future__ import annotations

import functools

import pytest
import torch
from attention import ORDERS, USUAL, Case, Problem, check, decode, extend, has_two_terms, row_errors, runs
from helpers import one_thread  # noqa: F401
from machines import Config, build_ahead

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels import extend as kernel
from sglang_quantkv.kernels.targets import Target

# A block of the kernel takes 128 query rows, 16 for each of its waves.
WHOLE_PROMPTS = (1, 9, 31, 33, 63, 64, 65, 127, 130, 257)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24)


@pytest.fixture(scope="module", autouse=True)
def built(request):
    phases = ("extend", "decode") if any("decode" in item.name for item in request.session.items) else ("extend",)
    for phase in phases:
        build_ahead(request, phase)


def cases(page_size: int) -> dict[str, Case]:
    found = {}
    for i, length in enumerate(WHOLE_PROMPTS):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        found[f"prompt of {length}"] = Case((length,), (length,), group=(1, 3)[i % 2], dtype=dtype)
    for i, group in enumerate(GROUPS):
        # Requests without query tokens, without a prefix, with one query token; tiles that begin inside a token.
        q_lens = (17, 0, 9, 1, 0, 35)
        found[f"group {group}"] = Case((70, 0, 9, 130, 40, 290), q_lens, group=group, kv_heads=1 + i % 2)
    found["one token each"] = Case((1, 64, 65, 300, 503), (1,) * 5, group=4, kv_heads=2)
    for i, window_left in enumerate((-1, 0, 1, 31, 63, 64, 100)):
        for j, (softcap, sinks) in enumerate(((0.0, False), (2.0, False), (0.0, True), (2.0, True))):
            features = {"window_left": window_left, "softcap": softcap, "sinks": sinks, "dtype": torch.float16}
            found[f"{features}"] = Case((260, 65, 1, 128), (70, 65, 1, 5), group=1 + (i + j) % 3, **features)
    for prefix in (0, page_size):
        lengths = range(prefix + 1, prefix + page_size + 1)
        q_lens = (min(n, 1 + n % 3) for n in lengths)
        found[f"lengths from {prefix} on"] = Case(tuple(lengths), tuple(q_lens), group=2, dtype=torch.float16)
    # More requests than a wave has lanes, many of them without query tokens.
    found["70 requests"] = Case((33,) * 70, tuple((0, 2, 0, 1, 33)[i % 5] for i in range(70)), group=5)
    return found


@functools.lru_cache(maxsize=1)  # tests of one config follow one another, and all configs together take gigabytes
def problems(config: Config) -> dict[str, Problem]:
    return {name: Problem(config, case, seed=i) for i, (name, case) in enumerate(cases(config.page_size).items())}


@runs()
def test_agrees_with_float64(config, machine):
    for i, (name, problem) in enumerate(problems(config).items()):
        order = ORDERS[i % 3]
        check(problem, extend(problem, machine, order), False, f"{name}, lanes in {order} order")


@runs(USUAL, "emulated_mma", "emulated_mfma", "emulated_mmac", on_gpu=False)
def test_the_order_of_lanes_changes_no_bit(config, machine):
    for problem in list(problems(config).values())[::5]:
        forward, *others = (extend(problem, machine, order) for order in ORDERS)
        assert all(torch.equal(forward, other) for other in others)


@runs(USUAL, "emulated_mma", "emulated_mfma")
def test_chunks_are_the_whole_prompt(config, machine):
    """Two chunks of a prompt see what one chunk sees; rows may lie in other tiles, and masks may cut other steps."""
    whole = Problem(config, Case((200,), (200,), group=2))
    once = extend(whole, machine)
    check(whole, once, False)
    parts = []
    for start, end in ((0, 77), (77, 200)):
        rows = {
            "keys": [whole.keys[0][:end]],
            "values": [whole.values[0][:end]],
            "queries": [whole.queries[0][start:end]],
        }
        parts.append(extend(Problem(config, Case((end,), (end - start,), group=2), **rows), machine))
    assert row_errors(torch.cat(parts), once.double()).square().mean().sqrt() < 5e-3


@runs(USUAL, "emulated_mma", "emulated_mfma")
def test_decode_computes_the_same(config, machine):
    problem = Problem(config, Case((257, 64, 1, 130), (1,) * 4, group=3, kv_heads=2, sinks=True, window_left=90))
    by_decode, by_extend = decode(problem, machine), extend(problem, machine)
    check(problem, by_decode, has_two_terms(machine, problem.case.rows))
    check(problem, by_extend, False)


@runs(USUAL, "emulated_mma")
def test_error_of_quantization(config, machine, measured):
    """Kernel and format together, against float64 attention to the tensors before quantization."""
    problem = Problem(config, Case((600, 300), (64, 100), group=4, kv_heads=2, dtype=torch.float16))
    errors = [
        float((x.double() - problem.unquantized).norm() / problem.unquantized.norm())
        for x in (extend(problem, machine), problem.expected)
    ]
    measured(f"extend {config} on {machine}: {errors[0]:.2%} from unquantized attention, the format {errors[1]:.2%}")
    # Errors of kernel and format are independent.
    assert errors[0] <= (errors[1] ** 2 + 1.5e-2**2) ** 0.5


@runs([Config("int8", 128, 64)], "emulated_mma", "emulated_mfma")
def test_a_request_without_tokens_is_zeros(config, machine):
    """As a padded batch has it: query tokens, and a length of 0."""
    cache = config.cache(machine.device)
    q = torch.ones(3, 4, 128, dtype=torch.bfloat16, device=machine.device)
    table, lengths, starts = (
        torch.tensor(x, dtype=torch.int32, device=machine.device) for x in ([[2147480000]], [0], [0, 3])
    )
    out = kernel.extend(cache, q, table, lengths, starts, scale=1.0, target=machine.target)
    assert torch.equal(out, torch.zeros_like(q))


def test_pages_that_do_not_fit_are_refused():
    """A page of 128 tokens at head_dim 256 is a tile of 65 KiB: more than the shared memory of a 64-lane unit."""
    cache = Config("int8", 256, 128).cache()
    q = torch.ones(1, 2, 256, dtype=torch.bfloat16)
    table, lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([[1]], [1], [0, 1]))
    with pytest.raises(UnsupportedConfig, match="pages of 128 tokens at head_dim 256 on emulated_mfma.*page-size 64"):
        kernel.extend(cache, q, table, lengths, starts, scale=1.0, target=Target("emulated_mfma"))
