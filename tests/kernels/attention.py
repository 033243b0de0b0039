"""Attention on packed pages: cases, calls of the kernels, and what float64 makes of the same cache.

Every case is hostile around its edges. Whatever no request may look at holds the worst bytes there are: slots past a
request's end, pages of nobody, padding of head blocks, page-table entries past the last page. ``out`` lies inside a
larger tensor whose rest must stay as it is, and ``q`` has the strides of a slice.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch
from machines import CONFIGS, Config, Machine, machines

from sglang_quantkv.formats import E8M0_NAN, RECIPES, HeadBlock
from sglang_quantkv.kernels import decode as decode_route
from sglang_quantkv.kernels import extend as extend_route
from sglang_quantkv.kernels import torch_routes
from sglang_quantkv.kernels.targets import Platform
from sglang_quantkv.reference import PagedCache

UNUSED_ENTRY = 2147480000  # of a page table: no page of any pool
UNTOUCHED = 77.0  # what surrounds out
ORDERS = ("forward", "reverse", "random")

USUAL = [Config(recipe, 128, 64) for recipe in RECIPES]
# Every recipe with every head dim and every page size, on the maps of 32 and of 64 lanes. A tile of 128 tokens of a
# large head does not fit in the shared memory of the latter.
ON_MMA = [Config(recipe, *shape) for recipe in RECIPES for shape in ((128, 64), (64, 32), (256, 128))]
ON_MFMA = [Config(recipe, *shape) for recipe in RECIPES for shape in ((128, 64), (64, 128), (256, 32))]
# emulated_mmac differs from emulated_mfma in the accumulator's map; emulated_mfma_wide in the integer step, which
# 4-bit K and V do without.
ON_MMAC = ON_MFMA
ON_MFMA_WIDE = [config for config in ON_MFMA if config.recipe == "int8"] + [Config("k8v4", 128, 64)]
ON_GPU = list(dict.fromkeys(ON_MMA + CONFIGS))


def runs(configs: list[Config] | None = None, *emulated: str, on_gpu: bool = True):
    """Parameters ``config`` and ``machine`` for tests: all that there is to run, or these on those."""
    if configs is not None:
        pairs = [(configs, machines(*emulated))]
    else:
        pairs = [
            (ON_MMA, machines("emulated_mma")[:1]),
            (ON_MFMA, machines("emulated_mfma")[:1]),
            (ON_MMAC, machines("emulated_mmac")[:1]),
            (ON_MFMA_WIDE, machines("emulated_mfma_wide")[:1]),
            (ON_GPU, machines()),
        ]
    found = []
    for some, those in pairs:
        for config, machine in itertools.product(some, those):
            if isinstance(machine, Machine):
                found.append(pytest.param(config, machine))
            elif on_gpu:
                found.append(pytest.param(config, *machine.values, marks=machine.marks))
    # Machines of one config follow one another, so that they share its problems.
    order = list(dict.fromkeys(param.values[0] for param in found))
    found.sort(key=lambda param: order.index(param.values[0]))
    return pytest.mark.parametrize(("config", "machine"), found, ids=str)


@dataclass(frozen=True)
class Case:
    """One batch: what is asked of decode or extend, apart from the kind of cache."""

    lengths: tuple[int, ...]
    q_lens: tuple[int, ...]
    group: int = 1
    kv_heads: int = 1
    window_left: int = -1
    softcap: float = 0.0
    sinks: bool = False
    tree: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        """Query rows that share a KV head's keys, in decode."""
        return self.group * max(self.q_lens)


class Problem:
    """A case with its tensors, on the CPU. Keys, values and queries may be given, one tensor per request."""

    def __init__(self, config: Config, case: Case, *, keys=None, values=None, queries=None, seed=0, poison=True):
        self.config, self.case, self.seed = config, case, seed
        random = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=random)

        heads, head_dim = case.group * case.kv_heads, config.head_dim
        drawn = (
            [randn(n, count, head_dim) for n in lengths]
            for lengths, count in ((case.lengths, case.kv_heads), (case.lengths, case.kv_heads), (case.q_lens, heads))
        )
        given = (keys, values, queries)
        self.keys, self.values, self.queries = (mine or others for mine, others in zip(given, drawn))
        self.queries = [q.to(case.dtype) for q in self.queries]
        self.sinks = randn(heads) if case.sinks else None
        self.tree = [random_tree(q_len, random) for q_len in case.q_lens] if case.tree else None
        self._fill(random, poison)

    def changed(self, operand: str, request: int, element: tuple[int, int, int], value: float) -> Problem:
        """The same but for one element of the ``operand`` ("keys", "values" or "queries") of a request."""
        given = {name: [x.clone() for x in getattr(self, name)] for name in ("keys", "values", "queries")}
        given[operand][request][element] = value
        return Problem(self.config, self.case, seed=self.seed, **given)

    def _fill(self, random: torch.Generator, poison: bool) -> None:
        """Stores keys and values in pages of a random order; page 0 and the last belong to nobody."""
        size, lengths = self.config.page_size, self.case.lengths
        counts = [math.ceil(n / size) for n in lengths]
        self.cache = self.config.cache(heads=self.case.kv_heads, pages=sum(counts) + 2, pattern=0)
        if poison:
            poison_records(self.cache.k_records, self.cache.k_block)
            poison_records(self.cache.v_records, self.cache.v_block)
        self.page_table = torch.full((len(lengths), max(counts) + 2), UNUSED_ENTRY, dtype=torch.int32)
        pages = iter((1 + torch.randperm(sum(counts), generator=random)).split(counts))
        for request, own in enumerate(pages):
            self.page_table[request, : len(own)] = own
        self.slots = [
            self.page_table[request].long()[torch.arange(n) // size] * size + torch.arange(n) % size
            for request, n in enumerate(lengths)
        ]
        torch_routes.store(self.cache, torch.cat(self.slots), torch.cat(self.keys), torch.cat(self.values))

    @cached_property
    def expected(self) -> torch.Tensor:
        """float64 ``[query tokens, Hq, D]``: attention to what the cache holds."""
        return self._attention([self.cache.read(slots) for slots in self.slots])

    @cached_property
    def unquantized(self) -> torch.Tensor:
        """float64 ``[query tokens, Hq, D]``: attention to the keys and values before quantization."""
        return self._attention(list(zip(self.keys, self.values)))

    def _attention(self, cached) -> torch.Tensor:
        out = []
        for request, (k, v) in enumerate(cached):
            q = self.queries[request].double().unflatten(1, (self.case.kv_heads, -1))
            scores = torch.einsum("qhgd,khd->hgqk", q, k.double()) * self.config.head_dim**-0.5
            if self.case.softcap:
                scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
            scores = scores.masked_fill(~self.visible(request), -torch.inf)
            if self.sinks is not None:
                column = self.sinks.double().view(self.case.kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, column), dim=-1)
            p = scores.softmax(-1)[..., : len(k)] if len(k) else scores[..., :0]
            out.append(torch.einsum("hgqk,khd->qhgd", p, v.double()).flatten(1, 2))
        return torch.cat(out)

    def visible(self, request: int) -> torch.Tensor:
        """bool ``[Tq, Tk]``: which tokens each query token sees."""
        n, q_len = self.case.lengths[request], self.case.q_lens[request]
        prefix, keys = n - q_len, torch.arange(n)
        own = torch.ones(q_len, q_len).tril().bool() if self.tree is None else self.tree[request]
        seen = torch.ones(q_len, n, dtype=torch.bool)
        if n:
            seen[:, prefix:] = own
        if self.case.window_left >= 0:
            place = prefix + own.sum(1, keepdim=True) - 1  # one after the last query token that it descends from
            seen &= keys >= place - self.case.window_left
        return seen


def random_tree(q_len: int, random: torch.Generator) -> torch.Tensor:
    """bool ``[q_len, q_len]``: token i sees itself, an earlier token or none of them, and all that this one sees."""
    own = torch.eye(q_len, dtype=torch.bool)
    for i in range(1, q_len):
        parent = int(torch.randint(-1, i, (), generator=random))
        if parent >= 0:
            own[i] |= own[parent]
    return own


def poison_records(records: torch.Tensor, block: HeadBlock) -> None:
    """The largest codes, NaN or 255 for scales, and ones in the padding."""
    records.fill_(0xFF)
    if block.format.element == "int8":
        records[..., : block.payload_nbytes] = 0x7F
    if block.format.scale_dtype == "e8m0":
        end = block.page_size * block.format.row_nbytes(block.head_dim)
        records[..., block.payload_nbytes : end] = E8M0_NAN


@dataclass
class Call:
    """A problem's tensors on a machine, ready for either kernel; ``q`` and ``out`` are slices of larger tensors."""

    problem: Problem
    machine: Machine
    out: torch.Tensor = field(init=False)

    def __post_init__(self):
        problem, device = self.problem, self.machine.device
        cache = problem.cache
        self.cache = PagedCache(cache.k_records.to(device), cache.v_records.to(device), cache.k_block, cache.v_block)
        self.page_table = problem.page_table.to(device)
        self.seq_lens = torch.tensor(problem.case.lengths, dtype=torch.int32, device=device)
        q = torch.cat(problem.queries)
        tokens, heads, head_dim = q.shape
        fused = torch.full((tokens, heads + 2, head_dim), torch.nan, dtype=q.dtype, device=device)
        self.q = fused[:, 1:-1]
        self.q.copy_(q)
        # Heads before tokens, and room on every side.
        self.around = torch.full((heads + 2, tokens + 2, head_dim + 8), UNTOUCHED, dtype=q.dtype, device=device)
        self.out = self.around[1:-1, 1:-1, 4:-4].transpose(0, 1)
        self.options = {
            "scale": head_dim**-0.5,
            "softcap": problem.case.softcap,
            "sinks": None if problem.sinks is None else problem.sinks.to(device),
            "target": self.machine.target,
        }

    def result(self) -> torch.Tensor:
        """What was written to ``out``; nothing else was."""
        written = self.out.clone().cpu()
        self.out.fill_(UNTOUCHED)
        assert (self.around == UNTOUCHED).all(), "something beside out was written"
        return written


def decode(problem: Problem, machine: Machine, order: str = ORDERS[0]) -> torch.Tensor:
    """``[query tokens, Hq, D]`` by the decode kernel; every request has as many query tokens as the first that is
    not empty, an empty one too."""
    call = Call(problem, machine)
    case, target = problem.case, call.options["target"]
    tree_mask = None
    if problem.tree is not None:
        bits = [(own << torch.arange(len(own))).sum(1) for own in problem.tree]
        tree_mask = torch.stack(bits).to(torch.uint8).to(machine.device)
    os.environ["QUANTKV_EMULATED_ORDER"] = order
    plan = decode_route.plan(
        call.cache, call.seq_lens, case.group, q_len=case.q_lens[0], window_left=case.window_left, target=target
    )
    decode_route.decode(
        call.cache, call.q, call.page_table, call.seq_lens, plan, tree_mask=tree_mask, out=call.out, **call.options
    )
    return call.result()


def extend(problem: Problem, machine: Machine, order: str = ORDERS[0]) -> torch.Tensor:
    """``[query tokens, Hq, D]`` by the extend kernel."""
    call = Call(problem, machine)
    starts = torch.tensor([0, *problem.case.q_lens]).cumsum(0).to(machine.device, torch.int32)
    os.environ["QUANTKV_EMULATED_ORDER"] = order
    extend_route.extend(
        call.cache, call.q, call.page_table, call.seq_lens, starts,
        window_left=problem.case.window_left, out=call.out, **call.options,
    )  # fmt: skip
    return call.result()


# ---- errors -----------------------------------------------------------------------------------------

# What rounding the outputs costs, relative to their length: an error is spread evenly over an ulp.
ROUNDING = {torch.bfloat16: 1.7e-3, torch.float16: 2.2e-4}
# With two terms, queries and int8 probabilities carry 16 bits; with 4-bit V, probabilities are bf16, as outputs are.
TWO_TERMS = {"int8": 5e-5, "k8v4": 1.6e-3, "mxfp4": 1.6e-3, "fp4_g32": 1.6e-3}
# With one, queries are int8 in rows (int8 K) or in blocks of 32 (4-bit K): with amax at 3 or 2.3 sigma, steps of
# amax / 127 move a score of spread 1 by 0.7% or 0.5%, and a probability by as much; int8 probabilities add 0.8%.
ONE_TERM = {"int8": 1.3e-2, "k8v4": 1.0e-2, "mxfp4": 8e-3, "fp4_g32": 8e-3}


def has_two_terms(machine: Machine, rows: int) -> bool:
    """Whether decode's query columns have room for residuals."""
    has_32_lanes = machine.target.platform == Platform.CUDA or machine.target.name == "emulated_mma"
    return rows <= (4 if has_32_lanes else 8)


def row_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """float64 ``[query tokens, Hq]``: each output row's distance from the expected one, relative to its length."""
    return (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)


def check(problem: Problem, got: torch.Tensor, two_terms: bool, name: str = "") -> None:
    """Rows of requests with tokens are as close to float64 as the number formats allow; those of others are zeros."""
    live = torch.cat([torch.full((q,), n > 0) for n, q in zip(problem.case.lengths, problem.case.q_lens)])
    assert (got[~live] == 0).all(), name
    if not live.any():
        return
    errors = row_errors(got, problem.expected)[live]
    own = (TWO_TERMS if two_terms else ONE_TERM)[problem.config.recipe]
    bound = 1.15 * math.hypot(own, ROUNDING[problem.case.dtype])
    # Rows differ: one that sees two tokens is as wrong as the difference of their scores, which has its own tail.
    assert errors.square().mean().sqrt() <= bound and errors.max() <= 3 * bound, (
        f"{name}: errors of {errors.square().mean().sqrt():.2e}, up to {errors.max():.2e}; bound {bound:.2e}"
    )
