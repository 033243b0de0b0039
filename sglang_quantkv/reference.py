"""The executable specification: quantization, records and paged attention in slow, plain torch.

Every kernel is held to this file, byte for byte where it writes pages and within a stated bound where
it computes attention. Formulas are written from the definitions, not from how a kernel would do them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from sglang_quantkv import formats
from sglang_quantkv.formats import Format, HeadBlock

# The one bit pattern that a row's float32 scale takes when the row holds NaN or Inf.
NAN_SCALE = float("nan")


def quantize(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows.

    Args:
        x: ``[..., D]``, any strides, bfloat16, float16 or float32; computed on in float32.

    Returns:
        codes: int8 ``[..., D]`` for int8, otherwise packed uint8 ``[..., D/2]``, low nibble first.
        scales: float32 ``[..., num_scales]`` (1 for int8), or uint8 E8M0 bytes of that shape.

    A row (or group) with NaN or Inf has codes 0 and a NaN scale (byte 255), so that whoever reads it
    sees NaN. One whose scale would be 0 has codes 0.
    """
    x = x.float()
    groups = x.unflatten(-1, (fmt.num_scales(x.shape[-1]), -1))
    amax = groups.abs().amax(-1)
    finite = amax.isfinite()
    if fmt.scale_dtype == "e8m0":
        scales = torch.where(finite, _e8m0_of_amax(amax), formats.E8M0_NAN).to(torch.uint8)
        divisor = e8m0_value(scales)
    else:
        largest = formats.INT8_MAX if fmt.element == "int8" else _magnitudes(fmt)[-1]
        # By a tensor: torch divides by a Python number on a GPU by multiplying with its reciprocal.
        scales = torch.where(finite, amax / torch.as_tensor(largest, dtype=amax.dtype, device=amax.device), NAN_SCALE)
        divisor = scales
    has_codes = finite & (amax > 0) & (divisor > 0)
    scaled = torch.where(has_codes[..., None], groups / divisor[..., None], 0.0).flatten(-2)
    if fmt.element == "int8":
        return scaled.round().clamp(-formats.INT8_MAX, formats.INT8_MAX).to(torch.int8), scales
    codes = _nearest_code(scaled.abs(), _magnitudes(fmt)) | (scaled.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The float32 ``[..., D]`` that codes and scales stand for; arguments as ``quantize`` returns them."""
    if fmt.element == "int8":
        values = codes.float()
    else:
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
        values = torch.where(nibbles < 8, 1.0, -1.0) * _magnitudes(fmt).to(codes.device)[nibbles & 7]
    if fmt.scale_dtype == "e8m0":
        scales = e8m0_value(scales)
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def fake_quantize(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float32 ``[..., D]``: what ``x`` reads back as from a cache of this format, comparison formats included."""
    if fmt.element == "e4m3":  # SGLang's fp8 cache: no scale, saturating
        limit = torch.finfo(torch.float8_e4m3fn).max
        return x.float().clamp(-limit, limit).to(torch.float8_e4m3fn).float()
    return dequantize(*quantize(x, fmt), fmt)


def e8m0_value(byte: torch.Tensor) -> torch.Tensor:
    """float32 value of E8M0 bytes (OCP MX v1.0, section 5.4.1): 2**(byte - 127), NaN for 255."""
    value = torch.ldexp(torch.ones_like(byte, dtype=torch.float64), byte.long() - formats.E8M0_BIAS).float()
    return torch.where(byte == formats.E8M0_NAN, torch.nan, value)


def _e8m0_of_amax(amax: torch.Tensor) -> torch.Tensor:
    """Biased exponent of the smallest power of two s with amax <= E8M0_LIMIT * s, clamped; 127 for amax 0."""
    exponents = torch.arange(formats.E8M0_MIN, formats.E8M0_MAX, device=amax.device)
    limits = formats.E8M0_LIMIT * 2.0 ** (exponents.double() - formats.E8M0_BIAS)
    byte = formats.E8M0_MIN + torch.searchsorted(limits, amax.double())
    return torch.where(amax == 0, formats.E8M0_ZERO_BLOCK, byte)


def _magnitudes(fmt: Format) -> torch.Tensor:
    """float32 ``[8]``: the magnitudes of the format's 4-bit codes."""
    return torch.tensor(
        {
            "e2m1": formats.E2M1_MAGNITUDES,
            "e3m0": formats.E3M0_MAGNITUDES,
            "int4": tuple(map(float, range(8))),
        }[fmt.element]
    )


def _nearest_code(x: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """uint8 index of the magnitude nearest to x >= 0; ties to the even index; saturating."""
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=x.device)
    magnitudes = magnitudes.to(x.device)
    distance = (x.clamp(max=magnitudes[-1])[..., None].double() - magnitudes[even_first]).abs()
    return even_first[distance.argmin(-1)].to(torch.uint8)  # argmin takes the first of equals


# ---- records ----------------------------------------------------------------------------------------


def encode(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """uint8 ``[..., row_nbytes]``: the packed codes of each row of ``x [..., D]``, then its scales' bytes."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], fmt.row_nbytes(x.shape[-1]), dtype=torch.uint8)
    codes, scales = quantize(x, fmt)
    return torch.cat((codes.view(torch.uint8), scales.contiguous().view(torch.uint8)), dim=-1)


def decode_rows(rows: torch.Tensor, fmt: Format, head_dim: int) -> torch.Tensor:
    """float32 ``[..., D]`` of the uint8 rows that ``encode`` makes."""
    codes, scales = rows.split((fmt.code_nbytes(head_dim), fmt.scale_nbytes(head_dim)), dim=-1)
    if fmt.element == "int8":
        codes = codes.view(torch.int8)
    if fmt.scale_dtype == "float32":
        scales = scales.contiguous().view(torch.float32)
    return dequantize(codes, scales, fmt)


@cache
def row_offsets(block: HeadBlock) -> torch.Tensor:
    """int64 ``[P, row_nbytes]``: where each byte of each token's row lies in the head block."""
    return torch.tensor([block.row_offsets(token) for token in range(block.page_size)])


def _addresses(records: torch.Tensor, block: HeadBlock, slots: torch.Tensor):
    offsets = row_offsets(block).to(records.device)[slots % block.page_size]
    heads = torch.arange(records.shape[1], device=records.device)
    return (slots // block.page_size)[:, None, None], heads[None, :, None], offsets[:, None, :]


def write_rows(records: torch.Tensor, block: HeadBlock, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows into their slots, in place.

    Args:
        records: uint8 ``[pages, Hkv, block.nbytes]``.
        slots: int64 ``[n]``, each in ``0 .. pages * P - 1``, no two equal.
        rows: uint8 ``[n, Hkv, row_nbytes]``.
    """
    records[_addresses(records, block, slots)] = rows


def read_rows(records: torch.Tensor, block: HeadBlock, slots: torch.Tensor) -> torch.Tensor:
    """uint8 ``[n, Hkv, row_nbytes]``: the rows in those slots; arguments as for ``write_rows``."""
    return records[_addresses(records, block, slots)]


@dataclass(frozen=True)
class PagedCache:
    """One layer's packed pages: uint8 ``[pages, Hkv, block.nbytes]`` for K and for V."""

    k_records: torch.Tensor
    v_records: torch.Tensor
    k_block: HeadBlock
    v_block: HeadBlock

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 K ``[n, Hkv, D]`` and V ``[n, Hkv, Dv]`` of those slots."""
        k, v = (
            decode_rows(read_rows(records, block, slots), block.format, block.head_dim)
            for records, block in ((self.k_records, self.k_block), (self.v_records, self.v_block))
        )
        return k, v


# ---- store ------------------------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """Normalizes rows ``x [..., D]`` by their root mean square and multiplies by ``weight [D] + offset``, in float32.

    The order of the sum of squares is fixed, so that every implementation gets the same bits: each 8 elements
    one after another, then neighbouring partial sums in pairs.

    Returns:
        As ``x``: the result is rounded to its dtype, as a norm that is a kernel of its own would.
    """
    values = x.float()
    squares = (values * values).unflatten(-1, (-1, 8))
    total = squares[..., 0]
    for i in range(1, 8):
        total = total + squares[..., i]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    # Division by a tensor: by a Python number torch may multiply with its reciprocal. The root by way of float64:
    # torch's float32 root on a CPU is not the IEEE one.
    root = (total / total.new_tensor(x.shape[-1]) + eps).double().sqrt().float()
    return (values * (torch.ones_like(root) / root) * (weight.float() + offset)).to(x.dtype)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Rotary embedding of ``x [n, heads, D]``, in float32 and without fused multiply-add, rounded to x's dtype.

    Args:
        positions: int64 ``[n]``.
        cos_sin: float32 ``[max_position, rotary_dim]``, SGLang's ``cos_sin_cache``: cosines, then sines. Elements
            from ``rotary_dim`` on stay as they are.
        interleaved: a pair is ``(2i, 2i + 1)`` (GPT-J) instead of ``(i, i + rotary_dim / 2)`` (NeoX).
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    rotated, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    values = rotated.float()
    a, b = (values[..., 0::2], values[..., 1::2]) if interleaved else values.chunk(2, dim=-1)
    parts = (a * cos - b * sin, b * cos + a * sin)
    values = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((values.to(x.dtype), kept), dim=-1)


def store(
    cache: PagedCache,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    eps: float = 1e-6,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Norm, rotary embedding, quantization and paged write of new tokens, each step only if its arguments are there.

    Args:
        slots: int64 ``[n]``; a token with a negative slot is not written. Slots repeat only in page 0, whose content
            nobody reads: any of the tokens may end up there.
        k, v: ``[n, Hkv, D]``, bfloat16 or float16 (or float32).
        q: ``[n, Hq, D]``, of the same dtype.
        positions, cos_sin, interleaved: as for ``rotate``; applied to q and k.
        q_weight, k_weight, weight_offset, eps: as for ``rms_norm``; applied before the rotary embedding.

    Returns:
        q and k of every token, normalized and rotated; None for q without q. Routes that take int8 queries take
        ``quantize(q, INT8)`` of it.
    """

    def prepared(x, weight):
        if weight is not None:
            x = rms_norm(x, weight, eps, weight_offset)
        return x if cos_sin is None else rotate(x, positions, cos_sin, interleaved=interleaved)

    q, k = None if q is None else prepared(q, q_weight), prepared(k, k_weight)
    written = slots >= 0
    for records, block, x in ((cache.k_records, cache.k_block, k), (cache.v_records, cache.v_block, v)):
        write_rows(records, block, slots[written], encode(x[written], block.format))
    return q, k


# ---- attention --------------------------------------------------------------------------------------


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one request's last ``Tq`` tokens over all of its ``Tk`` tokens, in float32.

    Args:
        q: ``[Tq, Hq, D]``; query i stands at position ``Tk - Tq + i``.
        k, v: ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``; query head h reads KV head ``h // (Hq / Hkv)``.
        scale: multiplies the scores.
        window_left: earlier tokens that a query may see beside its own; -1 for all.
        softcap: c > 0 makes a score s into ``c * tanh(s / c)`` (Gemma 2, section 2).
        sinks: ``[Hq]`` logits that take part in the softmax and have no value (gpt-oss).

    Returns:
        float32 ``[Tq, Hq, Dv]``. A token that a query cannot see never enters its arithmetic.
    """
    num_queries, num_heads, _ = q.shape
    num_keys, kv_heads, v_dim = v.shape
    q, k, v = q.float().unflatten(1, (kv_heads, -1)), k.float(), v.float()
    out = q.new_empty(num_queries, num_heads, v_dim)
    for i in range(num_queries):
        last = num_keys - num_queries + i
        first = max(0, last - window_left) if window_left >= 0 else 0
        scores = torch.einsum("hgd,nhd->hgn", q[i], k[first : last + 1]) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(kv_heads, -1, 1)), dim=-1)
        p = scores.softmax(-1)[..., : last + 1 - first]
        out[i] = torch.einsum("hgn,nhd->hgd", p, v[first : last + 1]).flatten(0, 1)
    return out


def first_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: list[int], **params) -> torch.Tensor:
    """Requests without a cached prefix attend to their own unquantized K and V.

    Args:
        q, k, v: ``[sum(q_lens), heads, D]``, the requests one after another.
        params: as for ``attention``.
    """
    parts = zip(q.split(q_lens), k.split(q_lens), v.split(q_lens))
    return torch.cat([attention(*part, **params) for part in parts])


def extend(
    q: torch.Tensor, cache: PagedCache, page_table: torch.Tensor, seq_lens: list[int], q_lens: list[int], **params
) -> torch.Tensor:
    """Each request's last ``q_lens[i]`` tokens attend to all its ``seq_lens[i]`` tokens, read from packed pages.

    The queries' own K and V are in the pages already. Decode is ``q_lens`` of ones.

    Args:
        q: ``[sum(q_lens), Hq, D]``.
        page_table: int ``[requests, max_pages]``; entries past a request's last page, or before every query's
            window, are never read.
        params: as for ``attention``.
    """
    size = cache.k_block.page_size
    window_left = params.get("window_left", -1)
    out = []
    for request, part in enumerate(q.split(q_lens)):
        first = max(0, seq_lens[request] - q_lens[request] - window_left) if window_left >= 0 else 0
        positions = torch.arange(first, seq_lens[request], device=q.device)
        slots = page_table[request].long()[positions // size] * size + positions % size
        out.append(attention(part, *cache.read(slots), **params))
    return torch.cat(out)


def decode(q: torch.Tensor, cache: PagedCache, page_table: torch.Tensor, seq_lens: list[int], **params) -> torch.Tensor:
    """One query per request, ``[requests, Hq, D]``; otherwise as ``extend``."""
    return extend(q, cache, page_table, seq_lens, [1] * len(seq_lens), **params)
