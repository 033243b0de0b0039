"""Extend on packed pages: chunks of queries over cached prefixes and the chunks themselves."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.arguments import check_tensor, find_device_target, find_function
from sglang_quantkv.kernels.attention_arguments import check_attention
from sglang_quantkv.kernels.build import Unit
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.units import unit_of
from sglang_quantkv.reference import PagedCache


def extend(
    cache: PagedCache,
    q: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    target: Target | None = None,
) -> Tensor:
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
        UnsupportedConfig: for tensors of other shapes, dtypes, devices or alignments, or a cache without a kernel.
    """
    out = torch.empty_like(q) if out is None else out
    check_attention(cache, q, out, page_table, seq_lens, sinks)
    check_tensor("query_starts", query_starts, (len(seq_lens) + 1,), (torch.int32,), q.device, packed=False)
    unit, target = unit_of("extend", cache), find_device_target(q.device, target)
    stages = _stages(unit, target, q.device.index or 0)
    if len(seq_lens) and len(q):
        torch.ops.sglang_quantkv.extend(
            q, out, cache.k_records, cache.v_records, page_table, seq_lens, query_starts, sinks, scale, softcap,
            window_left, stages, unit.recipe, unit.page_size, target.name,
        )  # fmt: skip
    return out


@functools.cache
def _stages(unit: Unit, target: Target, device: int) -> int:
    function = find_function("extend_stages", "extend", unit.recipe, unit.head_dim, unit.page_size, target.name)
    if stages := function(device):
        return stages
    raise UnsupportedConfig(
        f"extend of pages of {unit.page_size} tokens at head_dim {unit.head_dim} on {target}",
        "tiles that fit in its shared memory",
        "Use --page-size 64",
    )


@torch.library.custom_op("sglang_quantkv::extend", mutates_args=("out",))
def _extend(
    q: Tensor,
    out: Tensor,
    k_records: Tensor,
    v_records: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window_left: int,
    stages: int,
    recipe: str,
    page_size: int,
    target: str,
) -> None:
    function = find_function("extend", "extend", recipe, q.shape[-1], page_size, target)
    function(
        q, out, k_records, v_records, page_table, seq_lens, query_starts, sinks, scale, softcap, window_left, stages
    )  # fmt: skip


@_extend.register_fake
def _(*arguments) -> None:
    pass
