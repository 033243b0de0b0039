"""Which unit a cache's kernels are in, and the checks that all attention kernels share."""

from __future__ import annotations

import functools

import torch

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import ATOM_BYTES, HEAD_BLOCK_ALIGNMENT, RECIPES, HeadBlock
from sglang_quantkv.kernels.build import HEAD_DIMS, Unit
from sglang_quantkv.reference import PagedCache

ELEMENTS = (torch.bfloat16, torch.float16)


def unit_of(phase: str, cache: PagedCache) -> Unit:
    """The unit that holds a phase's kernels for this cache.

    Raises:
        UnsupportedConfig: for a head dim without kernels, or K and V of different head dims.
    """
    return _unit(phase, cache.k_block, cache.v_block)


@functools.cache  # asked for at every call of every layer
def _unit(phase: str, k: HeadBlock, v: HeadBlock) -> Unit:
    if k.head_dim != v.head_dim or k.head_dim not in HEAD_DIMS:
        raise UnsupportedConfig(
            f"the {phase} kernel was asked for head_dim {k.head_dim} of K and {v.head_dim} of V",
            f"one head_dim of {', '.join(map(str, HEAD_DIMS))} for both",
            "Serve this model with the torch routes, or with --kv-cache-dtype auto",
        )
    recipe = next(r.name for r in RECIPES.values() if (r.k, r.v) == (k.format, v.format))
    return Unit(phase, recipe, k.head_dim, k.page_size)


def check_attention(
    cache: PagedCache,
    q: torch.Tensor,
    out: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Checks what extend and decode share.

    Raises:
        ValueError: says which tensor is not as it must be, and how it must be.
    """
    kv_heads = cache.k_records.shape[1]
    device = q.device
    _require(q.ndim == 3 and q.dtype in ELEMENTS, f"q must be bfloat16 or float16 [tokens, Hq, D], not {_describe(q)}")
    heads, head_dim = q.shape[1:]
    _require(heads % kv_heads == 0, f"{heads} query heads do not divide among {kv_heads} KV heads")
    _require(head_dim == cache.k_block.head_dim, f"q has head_dim {head_dim}, the cache {cache.k_block.head_dim}")
    for name, x in (("q", q), ("out", out)):
        _require(
            x.shape == q.shape and x.dtype == q.dtype, f"{name} must be like q, {_describe(q)}, not {_describe(x)}"
        )
        _require(
            x.stride(2) == 1 and x.stride(0) % 4 == 0 and x.stride(1) % 4 == 0 and x.data_ptr() % 8 == 0,
            f"{name} must be contiguous along D, with other strides and its start at multiples of 8 bytes",
        )
    for name, records, block in (("K", cache.k_records, cache.k_block), ("V", cache.v_records, cache.v_block)):
        _require(
            records.dtype == torch.uint8 and records.shape[1:] == (kv_heads, block.nbytes),
            f"{name} records must be uint8 [pages, {kv_heads}, {block.nbytes}], not {_describe(records)}",
        )
        _require(
            records.stride(1) == block.nbytes
            and records.stride(2) == 1
            and records.stride(0) % HEAD_BLOCK_ALIGNMENT == 0
            and records.data_ptr() % ATOM_BYTES == 0,
            f"{name} head blocks must be contiguous, pages multiples of {HEAD_BLOCK_ALIGNMENT} bytes apart, and their "
            f"start a multiple of {ATOM_BYTES} bytes",
        )
    requests = len(seq_lens)
    _require(
        seq_lens.dtype == torch.int32 and seq_lens.is_contiguous(), f"seq_lens must be int32, not {_describe(seq_lens)}"
    )
    _require(
        page_table.dtype == torch.int32 and page_table.ndim == 2 and len(page_table) == requests,
        f"page_table must be int32 [{requests}, pages], not {_describe(page_table)}",
    )
    _require(page_table.stride(1) == 1 or page_table.shape[1] <= 1, "page_table must be contiguous along pages")
    if sinks is not None:
        _require(
            sinks.dtype == torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous(),
            f"sinks must be float32 [{heads}], not {_describe(sinks)}",
        )
    for name, x in (("out", out), ("records", cache.k_records), ("page_table", page_table), ("seq_lens", seq_lens)):
        _require(x.device == device, f"{name} is on {x.device}, q on {device}; all must be on one device")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"sglang_quantkv: {message}")


def _describe(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
