"""Decode and verify on packed pages: a plan per forward pass, then one call per layer.

Arguments of every function are checked here; the kernels trust them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_quantkv.kernels.build import load
from sglang_quantkv.kernels.targets import Target, current_target
from sglang_quantkv.kernels.units import check_attention, unit_of
from sglang_quantkv.reference import PagedCache

MAX_QUERY_TOKENS = 8


@dataclass(frozen=True)
class DecodeLayout:
    """How the kernel is laid out for a number of query rows on a device.

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
        return 3 * requests + 1 + self.workers + 2 * requests * kv_heads * self.row_blocks

    def num_partials(self, requests: int, kv_heads: int) -> int:
        """Partial results that a call may leave, each ``rows * (D + 2)`` float32."""
        return self.workers + requests * kv_heads * self.row_blocks


@dataclass(frozen=True)
class DecodePlan:
    """The work of one forward pass, cut into equal parts; layers with the same window share it."""

    layout: DecodeLayout
    workspace: torch.Tensor
    q_len: int
    window_left: int


def decode_layout(cache: PagedCache, group: int, q_len: int = 1, target: Target | None = None) -> DecodeLayout:
    """The layout for ``group`` query heads per KV head and ``q_len`` query tokens per request."""
    device = cache.k_records.device
    return DecodeLayout(*_module(cache, target).decode_layout(group * q_len, device.index or 0))


def plan(
    cache: PagedCache,
    seq_lens: torch.Tensor,
    group: int,
    *,
    q_len: int = 1,
    window_left: int = -1,
    workspace: torch.Tensor | None = None,
    target: Target | None = None,
) -> DecodePlan:
    """Plans a forward pass; runs on the device, so that a captured graph plans again at replay.

    Args:
        seq_lens: int32 ``[requests]``, the query tokens included; 0 leaves a request out.
        group: query heads per KV head.
        q_len: query tokens per request, 1 to 8.
        window_left: earlier tokens that a query sees; -1 for all.
        workspace: int32, at least ``DecodeLayout.plan_ints`` elements, written; made if left out.
    """
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        raise ValueError(f"q_len is {q_len}; decode takes 1 to {MAX_QUERY_TOKENS} query tokens per request. Use extend")
    layout = decode_layout(cache, group, q_len, target)
    kv_heads = cache.k_records.shape[1]
    size = layout.plan_ints(len(seq_lens), kv_heads)
    if workspace is None:
        workspace = seq_lens.new_empty(size, dtype=torch.int32)
    if workspace.dtype != torch.int32 or workspace.numel() < size or not workspace.is_contiguous():
        raise ValueError(f"the plan's workspace must be contiguous int32 of at least {size} elements")
    if len(seq_lens):
        segments = kv_heads * layout.row_blocks
        _module(cache, target).plan(workspace, seq_lens, q_len, window_left, segments, layout.workers)
    return DecodePlan(layout, workspace, q_len, window_left)


def decode(
    cache: PagedCache,
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    target: Target | None = None,
) -> torch.Tensor:
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
        ValueError: for tensors of other shapes, dtypes or devices.
    """
    requests, heads, head_dim = len(seq_lens), q.shape[1], q.shape[2]
    out = torch.empty_like(q) if out is None else out
    check_attention(cache, q, out, page_table, seq_lens, sinks)
    if len(q) != requests * plan.q_len:
        raise ValueError(
            f"q holds {len(q)} tokens; {requests} requests of {plan.q_len} query tokens have {requests * plan.q_len}"
        )
    if tree_mask is not None:
        if tree_mask.dtype != torch.uint8 or tree_mask.shape != (requests, plan.q_len) or not tree_mask.is_contiguous():
            raise ValueError(f"tree_mask must be contiguous uint8 of shape {(requests, plan.q_len)}")
        if 0 <= plan.window_left < plan.q_len - 1:
            raise ValueError(
                f"a tree of {plan.q_len} tokens needs a window of at least {plan.q_len - 1} earlier tokens"
            )
    if not requests:
        return out
    layout = plan.layout
    partials = layout.num_partials(requests, cache.k_records.shape[1])
    partial_out = q.new_empty((partials, layout.rows, head_dim), dtype=torch.float32)
    partial_state = q.new_empty((partials, layout.rows, 2), dtype=torch.float32)
    _module(cache, target).decode(
        q, out, cache.k_records, cache.v_records, page_table, seq_lens, plan.workspace, partial_out, partial_state,
        sinks, tree_mask, plan.q_len, scale, softcap, plan.window_left,
        [layout.rows, layout.row_blocks, layout.waves, layout.stages, layout.workers],
    )  # fmt: skip
    return out


def _module(cache: PagedCache, target: Target | None):
    return load(unit_of("decode", cache), target or current_target())
