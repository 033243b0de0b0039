"""Decode and verify on packed pages: a plan per forward pass, then one call per layer."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.arguments import check_tensor, find_device_target, find_function
from sglang_quantkv.kernels.attention_arguments import check_attention
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.units import unit_of
from sglang_quantkv.reference import PagedCache

MAX_QUERY_TOKENS = 8


@dataclass(frozen=True)
class DecodeLayout:
    """How the kernel is laid out for a number of query rows on a device; see hip/src/decode.h.

    Attributes:
        rows: query rows of a partial result.
        row_blocks: blocks of so many rows that a KV head's query rows fill.
        waves: of a block.
        stages: tiles that a wave has under way.
        workers: waves of the whole grid.
    """

    rows: int
    row_blocks: int
    waves: int
    stages: int
    workers: int

    def plan_ints(self, requests: int, kv_heads: int) -> int:
        """int32 elements of a plan's workspace; see hip/src/decode_plan.h."""
        return 3 * requests + 2 + 2 * self.workers + 2 * requests * kv_heads * self.row_blocks

    def num_partials(self, requests: int, kv_heads: int) -> int:
        """Partial results that a call may leave."""
        return self.workers + requests * kv_heads * self.row_blocks

    def scratch_elements(self, requests: int, kv_heads: int, head_dim: int) -> int:
        """float32 elements of a plan's partial results."""
        return self.num_partials(requests, kv_heads) * self.rows * (head_dim + 2)


@dataclass(frozen=True)
class DecodePlan:
    """The work of one forward pass, cut into equal parts. Layers with the same window and shape share it, one after
    another: its partial results are scratch memory.

    Attributes:
        workspace: int32, as planned on the device.
        partial_out: float32 ``[partials, rows, D]``.
        partial_state: float32 ``[partials, rows, 2]``.
    """

    layout: DecodeLayout
    q_len: int
    window_left: int
    workspace: Tensor
    partial_out: Tensor
    partial_state: Tensor


def decode_layout(cache: PagedCache, group: int, q_len: int = 1, target: Target | None = None) -> DecodeLayout:
    """The layout for ``group`` query heads per KV head and ``q_len`` query tokens per request.

    Raises:
        UnsupportedConfig: for a cache without a kernel, or more than 8 query tokens.
    """
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        raise UnsupportedConfig(
            f"decode with {q_len} query tokens per request", f"1 to {MAX_QUERY_TOKENS}", "Use extend for longer chunks"
        )
    device = cache.k_records.device
    unit, target = unit_of("decode", cache), find_device_target(device, target)
    function = find_function("decode_layout", "decode", unit.recipe, unit.head_dim, unit.page_size, target.name)
    layout = DecodeLayout(*function(group * q_len, device.index or 0))
    if not layout.waves:
        raise UnsupportedConfig(
            f"decode of pages of {unit.page_size} tokens at head_dim {unit.head_dim} on {target}",
            "tiles that fit in its shared memory",
            "Use --page-size 64",
        )
    return layout


def plan(
    cache: PagedCache,
    seq_lens: Tensor,
    group: int,
    *,
    q_len: int = 1,
    window_left: int = -1,
    scratch: Tensor | None = None,
    target: Target | None = None,
) -> DecodePlan:
    """Plans a forward pass, on the device: a captured graph plans again at every replay.

    Args:
        cache: any layer's that the plan is for.
        seq_lens: int32 ``[requests]``, the query tokens included; 0 leaves a request out.
        group: query heads per KV head.
        q_len: query tokens per request, 1 to 8.
        window_left: earlier tokens that a query sees; -1 for all.
        scratch: float32, at least ``layout.scratch_elements``, for the partial results; allocated if left out.

    Raises:
        UnsupportedConfig: as ``decode_layout``, or for tensors of another shape or dtype.
    """
    layout = decode_layout(cache, group, q_len, target)
    unit, device = unit_of("decode", cache), cache.k_records.device
    check_tensor("seq_lens", seq_lens, (None,), (torch.int32,), device, packed=False)
    requests, kv_heads = len(seq_lens), cache.k_records.shape[1]
    workspace = torch.empty(layout.plan_ints(requests, kv_heads), dtype=torch.int32, device=device)
    elements = layout.scratch_elements(requests, kv_heads, unit.head_dim)
    if scratch is None:
        scratch = torch.empty(elements, dtype=torch.float32, device=device)
    check_tensor("scratch", scratch, (None,), (torch.float32,), device)
    assert len(scratch) >= elements, "smaller than layout.scratch_elements"
    rows = layout.num_partials(requests, kv_heads) * layout.rows
    partial_out = scratch[: rows * unit.head_dim].view(-1, layout.rows, unit.head_dim)
    partial_state = scratch[rows * unit.head_dim : elements].view(-1, layout.rows, 2)
    if requests:
        torch.ops.sglang_quantkv.decode_plan(
            workspace, seq_lens, q_len, window_left, kv_heads * layout.row_blocks, layout.workers,
            unit.recipe, unit.head_dim, unit.page_size, find_device_target(device, target).name,
        )  # fmt: skip
    return DecodePlan(layout, q_len, window_left, workspace, partial_out, partial_state)


def decode(
    cache: PagedCache,
    q: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    target: Target | None = None,
) -> Tensor:
    """The last ``plan.q_len`` tokens of each request attend to all its tokens, read from packed pages.

    Args:
        q: bfloat16 or float16 ``[requests * q_len, Hq, D]``, a request's query tokens one after another.
        page_table: int32 ``[requests, max_pages]``; entries past a request's last page, or before every query's
            window, are never read.
        seq_lens: int32 ``[requests]``, as planned.
        scale, softcap: as for ``reference.attention``.
        sinks: float32 ``[Hq]``.
        tree_mask: uint8 ``[requests, q_len]``, bit j of entry i: query token i sees query token j; causal if left out.
        out: written and returned; like ``q`` if left out.

    Raises:
        UnsupportedConfig: for tensors of other shapes, dtypes, devices or alignments.
    """
    out = torch.empty_like(q) if out is None else out
    check_attention(cache, q, out, page_table, seq_lens, sinks)
    requests, q_len = len(seq_lens), plan.q_len
    check_tensor("q", q, (requests * q_len, None, None), (q.dtype,), q.device, packed=False)
    if tree_mask is not None:
        check_tensor("tree_mask", tree_mask, (requests, q_len), (torch.uint8,), q.device, packed=False)
        if 0 <= plan.window_left < q_len - 1:
            raise UnsupportedConfig(
                f"a tree of {q_len} tokens under a window of {plan.window_left} earlier tokens",
                f"windows of {q_len - 1} and more",
                "Verify fewer tokens at a time",
            )
    if requests:
        unit = unit_of("decode", cache)
        torch.ops.sglang_quantkv.decode(
            q, out, cache.k_records, cache.v_records, page_table, seq_lens, plan.workspace, plan.partial_out,
            plan.partial_state, sinks, tree_mask, q_len, scale, softcap, plan.window_left, list(astuple(plan.layout)),
            unit.recipe, unit.page_size, find_device_target(q.device, target).name,
        )  # fmt: skip
    return out


@torch.library.custom_op("sglang_quantkv::decode_plan", mutates_args=("workspace",))
def _plan(
    workspace: Tensor,
    seq_lens: Tensor,
    q_len: int,
    window_left: int,
    segments: int,
    workers: int,
    recipe: str,
    head_dim: int,
    page_size: int,
    target: str,
) -> None:
    function = find_function("plan", "decode", recipe, head_dim, page_size, target)
    function(workspace, seq_lens, q_len, window_left, segments, workers)


@torch.library.custom_op("sglang_quantkv::decode", mutates_args=("out", "partial_out", "partial_state"))
def _decode(
    q: Tensor,
    out: Tensor,
    k_records: Tensor,
    v_records: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    workspace: Tensor,
    partial_out: Tensor,
    partial_state: Tensor,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    q_len: int,
    scale: float,
    softcap: float,
    window_left: int,
    layout: list[int],
    recipe: str,
    page_size: int,
    target: str,
) -> None:
    function = find_function("decode", "decode", recipe, q.shape[-1], page_size, target)
    function(
        q, out, k_records, v_records, page_table, seq_lens, workspace, partial_out, partial_state, sinks, tree_mask,
        q_len, scale, softcap, window_left, layout,
    )  # fmt: skip


@_plan.register_fake
def _(*arguments) -> None:
    pass


@_decode.register_fake
def _(*arguments) -> None:
    pass
