"""A range of each request's cached tokens as rows in high precision, for attention over a short prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_quantkv.kernels.arguments import check_cache, check_tensor, find_device_target, find_function
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.units import unit_of
from sglang_quantkv.reference import PagedCache


def dequantize(
    cache: PagedCache,
    page_table: Tensor,
    begins: Tensor,
    ends: Tensor,
    row_starts: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    max_tokens: int,
    *,
    target: Target | None = None,
) -> None:
    """Reads tokens ``begins[i] <= t < ends[i]`` of request i into rows ``row_starts[i] + t - begins[i]``, in place.

    A row is ``reference.decode_rows`` of its token, rounded to nearest even. No other row is written, and no page
    without such a token is read.

    Args:
        page_table: int32 ``[requests, max_pages]``; entries of pages wholly before ``begins``, or past ``ends``, are
            never read.
        begins, ends: int32 ``[requests]``, not negative.
        row_starts: int32 ``[requests]``, not negative.
        k_out, v_out: bfloat16 or float16 ``[rows, Hkv, D]``, contiguous, starting at a multiple of 16 bytes.
        max_tokens: the largest ``ends[i] - begins[i]``. Tokens of a request beyond as many, or beyond the last row,
            are left out.
        target: whose kernels run; this machine's if left out.

    Raises:
        UnsupportedConfig: for arguments that do not fit, or a cache without a kernel.
    """
    heads, device = check_cache(cache)
    unit = unit_of("dequantize", cache)
    check_tensor("begins", begins, (None,), (torch.int32,), device, packed=False)
    requests = len(begins)
    check_tensor("ends", ends, (requests,), (torch.int32,), device, packed=False)
    check_tensor("row_starts", row_starts, (requests,), (torch.int32,), device, packed=False)
    check_tensor("page_table", page_table, (requests, None), (torch.int32,), device, packed=False)
    check_tensor("k_out", k_out, (None, heads, unit.head_dim), (torch.bfloat16, torch.float16), device)
    check_tensor("v_out", v_out, tuple(k_out.shape), (k_out.dtype,), device)
    name = find_device_target(device, target).name
    if not requests or not len(k_out) or max_tokens <= 0:
        return
    torch.ops.sglang_quantkv.dequantize(
        cache.k_records, cache.v_records, page_table, begins, ends, row_starts, k_out, v_out, max_tokens, unit.recipe,
        unit.page_size, name,
    )  # fmt: skip


@torch.library.custom_op("sglang_quantkv::dequantize", mutates_args=("k_out", "v_out"))
def _dequantize(
    k_records: Tensor,
    v_records: Tensor,
    page_table: Tensor,
    begins: Tensor,
    ends: Tensor,
    row_starts: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    max_tokens: int,
    recipe: str,
    page_size: int,
    target: str,
) -> None:
    function = find_function("dequantize", "dequantize", recipe, k_out.shape[-1], page_size, target)
    function(k_records, v_records, page_table, begins, ends, row_starts, k_out, v_out, max_tokens)


@_dequantize.register_fake
def _(*arguments) -> None:
    pass
