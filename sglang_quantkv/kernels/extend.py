"""Extend on packed pages: chunks of queries over cached prefixes and the chunks themselves."""

from __future__ import annotations

import torch

from sglang_quantkv.kernels.build import load
from sglang_quantkv.kernels.targets import Target, current_target
from sglang_quantkv.kernels.units import check_attention, unit_of
from sglang_quantkv.reference import PagedCache


def extend(
    cache: PagedCache,
    q: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    target: Target | None = None,
) -> torch.Tensor:
    """Each request's last query tokens attend to all its tokens, read from packed pages.

    Args:
        q: bfloat16 or float16 ``[query tokens, Hq, D]``, the requests one after another.
        page_table: int32 ``[requests, max_pages]``; entries past a request's last page, or before every query's
            window, are never read.
        seq_lens: int32 ``[requests]``, the query tokens included.
        query_starts: int32 ``[requests + 1]``: where each request's query tokens begin in ``q``, and their number.
        scale, window_left, softcap: as for ``reference.attention``.
        sinks: float32 ``[Hq]``.
        out: written and returned; like ``q`` if left out.

    Raises:
        ValueError: for tensors of other shapes, dtypes or devices.
    """
    out = torch.empty_like(q) if out is None else out
    check_attention(cache, q, out, page_table, seq_lens, sinks)
    if (
        query_starts.dtype != torch.int32
        or query_starts.shape != (len(seq_lens) + 1,)
        or query_starts.device != q.device
    ):
        raise ValueError(f"query_starts must be int32 [{len(seq_lens) + 1}] on {q.device}")
    if len(seq_lens) and len(q):
        load(unit_of("extend", cache), target or current_target()).extend(
            q, out, cache.k_records, cache.v_records, page_table, seq_lens, query_starts, sinks, scale, softcap, window_left
        )  # fmt: skip
    return out
