"""The checks that extend and decode share."""

from __future__ import annotations

from torch import Tensor, bfloat16, float16, float32, int32

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.arguments import check_cache, check_tensor
from sglang_quantkv.reference import PagedCache

QUERY_ALIGNMENT = 4  # elements: queries are read, and outputs written, in pieces of 8 bytes


def check_attention(
    cache: PagedCache, q: Tensor, out: Tensor, page_table: Tensor, seq_lens: Tensor, sinks: Tensor | None
) -> None:
    """Checks what every attention kernel takes.

    Raises:
        UnsupportedConfig: says which argument is not as it must be, how it must be, and what to do.
    """
    kv_heads, device = check_cache(cache)
    check_tensor("q", q, (None, None, cache.k_block.head_dim), (bfloat16, float16), device, packed=False)
    check_tensor("out", out, tuple(q.shape), (q.dtype,), device, packed=False)
    for name, x in (("q", q), ("out", out)):
        if x.stride(0) % QUERY_ALIGNMENT or x.stride(1) % QUERY_ALIGNMENT or x.data_ptr() % (2 * QUERY_ALIGNMENT):
            raise UnsupportedConfig(
                f"{name} has strides {x.stride()} and starts {x.data_ptr() % 8} bytes past a multiple of 8",
                f"rows of heads at multiples of {QUERY_ALIGNMENT} elements",
                "Call .contiguous() on it",
            )
    heads = q.shape[1]
    if heads % kv_heads:
        raise UnsupportedConfig(
            f"{heads} query heads for {kv_heads} KV heads",
            "a multiple",
            "Look whether q or the cache is another layer's",
        )
    check_tensor("seq_lens", seq_lens, (None,), (int32,), device, packed=False)
    check_tensor("page_table", page_table, (len(seq_lens), None), (int32,), device, packed=False)
    if sinks is not None:
        check_tensor("sinks", sinks, (heads,), (float32,), device, packed=False)
