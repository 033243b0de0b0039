"""The fused store: norm, rotary embedding, quantization and paged write of new tokens, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.arguments import check_cache, check_tensor, find_device_target, find_function
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.units import unit_of
from sglang_quantkv.reference import PagedCache

ROTARY_DIM_STEP = 16


def store(
    cache: PagedCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    weight_offset: float = 0.0,
    eps: float = 1e-6,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    q_codes: Tensor | None = None,
    q_scales: Tensor | None = None,
    target: Target | None = None,
) -> None:
    """Does what ``reference.store`` does, with the same bytes; nothing is written that is not asked for.

    Args:
        slots: int64 ``[n]``; a token with a negative slot is not written. Slots repeat only in page 0.
        k, v: bfloat16 or float16 ``[n, Hkv, D]``; any strides but 1 on the last axis. Fastest where every row starts
            at a multiple of 16 bytes.
        q: ``[n, Hq, D]``, as k; with ``q_out`` or ``q_codes``.
        positions: int64 ``[n]``; with ``cos_sin``.
        cos_sin: float32 ``[max_position, rotary_dim]``: cosines, then sines; ``rotary_dim`` a multiple of 16, up to D.
        interleaved: rotary pairs are neighbours (GPT-J) instead of half a rotary_dim apart (NeoX).
        q_weight, k_weight: ``[D]``, as k: normalizes q (or k) before the rotary embedding.
        weight_offset: added to the weights in float32: 1 for Gemma's norms.
        q_out, k_out: as q and as k, written in place: q and k normalized and rotated, of every token, whatever its
            slot. They may be q and k themselves.
        q_codes, q_scales: int8 ``[n, Hq, D]`` and float32 ``[n, Hq]``, written in place: what ``q_out`` would be, as int8.
        target: whose kernels run; this machine's if left out.

    Raises:
        UnsupportedConfig: for arguments that do not fit, or a cache without a kernel.
    """
    heads, device = check_cache(cache)
    unit = unit_of("store", cache)
    tokens, head_dim = len(slots), unit.head_dim
    check_tensor("slots", slots, (tokens,), (torch.int64,), device, packed=False)
    check_tensor("k", k, (tokens, heads, head_dim), (torch.bfloat16, torch.float16), device, packed=False)
    check_tensor("v", v, (tokens, heads, head_dim), (k.dtype,), device, packed=False)
    if cos_sin is not None or positions is not None:
        _check_rotary(positions, cos_sin, tokens, head_dim, device)
    if q is not None:
        check_tensor("q", q, (tokens, None, head_dim), (k.dtype,), device, packed=False)
    _check_query_outputs(q, q_weight, q_out, q_codes, q_scales)
    if k_out is not None:
        check_tensor("k_out", k_out, tuple(k.shape), (k.dtype,), device, packed=False)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_tensor(name, weight, (head_dim,), (k.dtype,), device)
    name = find_device_target(device, target).name
    if not tokens:
        return
    torch.ops.sglang_quantkv.store(
        cache.k_records,
        cache.v_records,
        slots,
        k,
        v,
        q,
        positions,
        cos_sin,
        interleaved,
        q_weight,
        k_weight,
        weight_offset,
        eps,
        q_out,
        k_out,
        q_codes,
        q_scales,
        unit.recipe,
        unit.page_size,
        name,
    )


def _check_rotary(positions: Tensor | None, cos_sin: Tensor | None, tokens: int, head_dim: int, device) -> None:
    if positions is None or cos_sin is None:
        given = "positions without cos_sin" if cos_sin is None else "cos_sin without positions"
        raise UnsupportedConfig(given, "both or neither", "Pass both for a rotary embedding")
    check_tensor("positions", positions, (tokens,), (torch.int64,), device, packed=False)
    check_tensor("cos_sin", cos_sin, (None, None), (torch.float32,), device)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % ROTARY_DIM_STEP or not 0 < rotary_dim <= head_dim:
        raise UnsupportedConfig(
            f"cos_sin has rotary_dim {rotary_dim}",
            f"multiples of {ROTARY_DIM_STEP} up to head_dim {head_dim}",
            "Rotate q and k before, and leave cos_sin out",
        )


def _check_query_outputs(q, q_weight, q_out, q_codes, q_scales) -> None:
    if q is None:
        given = [
            n
            for n, t in zip(("q_weight", "q_out", "q_codes", "q_scales"), (q_weight, q_out, q_codes, q_scales))
            if t is not None
        ]
        if given:
            raise UnsupportedConfig(f"{', '.join(given)} without q", "q with what is wanted of it", "Pass q too")
        return
    if (q_codes is None) != (q_scales is None) or (q_out is None and q_codes is None):
        raise UnsupportedConfig(
            "q with " + ("nothing to write" if q_codes is q_scales else "only one of q_codes and q_scales"),
            "q_out, or q_codes and q_scales, or all three",
            "Pass what is wanted of q, or leave q out",
        )
    if q_out is not None:
        check_tensor("q_out", q_out, tuple(q.shape), (q.dtype,), q.device, packed=False)
    if q_codes is not None:
        check_tensor("q_codes", q_codes, tuple(q.shape), (torch.int8,), q.device)
        check_tensor("q_scales", q_scales, tuple(q.shape[:2]), (torch.float32,), q.device)


@torch.library.custom_op(
    "sglang_quantkv::store", mutates_args=("k_records", "v_records", "q_out", "k_out", "q_codes", "q_scales")
)
def _store(
    k_records: Tensor,
    v_records: Tensor,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor | None,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    interleaved: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    weight_offset: float,
    eps: float,
    q_out: Tensor | None,
    k_out: Tensor | None,
    q_codes: Tensor | None,
    q_scales: Tensor | None,
    recipe: str,
    page_size: int,
    target: str,
) -> None:
    function = find_function("store", "store", recipe, k.shape[-1], page_size, target)
    function(
        k_records,
        v_records,
        slots,
        k,
        v,
        q,
        positions,
        cos_sin,
        interleaved,
        q_weight,
        k_weight,
        weight_offset,
        eps,
        q_out,
        k_out,
        q_codes,
        q_scales,
    )


@_store.register_fake
def _(*arguments) -> None:
    pass
