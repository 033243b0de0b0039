"""The routes in plain torch: what a machine without an accelerator serves with. Any torch device works.

Same operations and arguments as ``reference``, and held to it: pages byte for byte, attention to the
rounding of float32 sums. Only the pages of the requests at hand are read, whatever the pool's size.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_quantkv import formats, reference
from sglang_quantkv.formats import Format, HeadBlock, int8_k_row
from sglang_quantkv.kernels.routes import Chunks, Routes
from sglang_quantkv.reference import PagedCache

# Query rows whose scores are held at a time: bounds the memory of a long chunk over a long prefix.
_QUERY_BLOCK = 256


class TorchRoutes(Routes):
    """The functions below, as a server calls them."""

    def implementations(self, phase):
        return ("torch",)

    def store(self, cache, slots, k, v):
        self.count("store", "torch", cache)
        store(cache, slots, k, v)

    def read_rows(self, cache, slots):
        return (
            reference.read_rows(cache.k_records, cache.k_block, slots),
            reference.read_rows(cache.v_records, cache.v_block, slots),
        )

    def write_rows(self, cache, slots, k_rows, v_rows):
        reference.write_rows(cache.k_records, cache.k_block, slots, k_rows)
        reference.write_rows(cache.v_records, cache.v_block, slots, v_rows)

    def plan_decode(self, cache, seq_lens, group, window_left) -> list[int]:
        return seq_lens.tolist()

    def decode(self, cache, q, page_table, seq_lens, plan: list[int], **params):
        self.count("decode", "torch", cache)
        if all(plan):
            return decode(q, cache, page_table, plan, **params).to(q.dtype)
        # Padding: a request of length 0 attends to nothing.
        real = [i for i, length in enumerate(plan) if length]
        out = q.new_zeros(*q.shape[:-1], cache.v_block.head_dim)
        if real:
            out[real] = decode(q[real], cache, page_table[real], [plan[i] for i in real], **params).to(q.dtype)
        return out

    def first_chunk(self, cache, q, k, v, chunks: Chunks, **params):
        self.count("first_chunk", "torch", cache)
        return first_chunk(q, k, v, chunks.q_lens, **params).to(q.dtype)

    def extend(self, cache, q, page_table, chunks: Chunks, **params):
        self.count("extend", "torch", cache)
        return extend(q, cache, page_table, chunks.seq_lens, chunks.q_lens, **params).to(q.dtype)


def store(cache: PagedCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Quantizes K ``[n, Hkv, D]`` and V ``[n, Hkv, Dv]`` and writes them into ``slots [n]``, in place.

    K carries its rotary embedding already. ``slots`` may repeat a slot only where nothing reads it.
    """
    for records, block, x in ((cache.k_records, cache.k_block, k), (cache.v_records, cache.v_block, v)):
        codes, scales = quantize(x, block.format)
        pages, tokens = slots // block.page_size, slots % block.page_size
        code_tile, scale_tile = _tiles(records, block)
        if block.is_token_atom:
            code_tile[pages, :, tokens // 16, :, tokens % 16] = codes
        else:
            rows = _rows(block).to(slots.device)[tokens]
            code_tile[pages, :, :, rows] = codes.unflatten(-1, (-1, formats.ATOM_BYTES))
        scale_tile[pages, :, :, tokens] = scales


def first_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_lens: list[int], **params) -> torch.Tensor:
    """Requests without a cached prefix attend to their own unquantized K and V; as ``reference.first_chunk``."""
    return torch.cat(
        [_own_attention(*part, **params) for part in zip(q.split(q_lens), k.split(q_lens), v.split(q_lens))]
    )


def _own_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **params) -> torch.Tensor:
    """Causal attention of one request over K ``[Tq, Hkv, D]`` and V ``[Tq, Hkv, Dv]`` of its own; by torch's fused
    kernel, in the inputs' dtype, where that computes the same thing."""
    q_heads, k_heads, v_heads = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    if (
        not 0 <= params.get("window_left", -1) < len(q) - 1
        and not params.get("softcap")
        and params.get("sinks") is None
    ):
        batch = (q_heads[None], k_heads[None], v_heads[None])
        out = scaled_dot_product_attention(*batch, is_causal=True, scale=params["scale"], enable_gqa=True)
        if out.isfinite().all():
            return out[0].transpose(0, 1).float()
    return _attend(q, k_heads.float(), v_heads.float(), **params)


def extend(
    q: torch.Tensor, cache: PagedCache, page_table: torch.Tensor, seq_lens: list[int], q_lens: list[int], **params
) -> torch.Tensor:
    """Requests' last tokens attend to packed pages; as ``reference.extend``."""
    size = cache.k_block.page_size
    out = []
    for request, part in enumerate(q.split(q_lens)):
        end = seq_lens[request]
        start = 0
        if (window_left := params.get("window_left", -1)) >= 0:
            start = max(0, end - q_lens[request] - window_left) // size * size
        pages = page_table[request, start // size : -(-end // size)].long()
        k, v = (
            _read(records, block, pages)[:, : end - start]
            for records, block in ((cache.k_records, cache.k_block), (cache.v_records, cache.v_block))
        )
        out.append(_attend(part, k, v, **params))
    return torch.cat(out)


def decode(q: torch.Tensor, cache: PagedCache, page_table: torch.Tensor, seq_lens: list[int], **params) -> torch.Tensor:
    """One query per request, ``[requests, Hq, D]``; as ``reference.decode``."""
    return extend(q, cache, page_table, seq_lens, [1] * len(seq_lens), **params)


def quantize(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.quantize``, for the formats that records exist for."""
    x = x.float()
    groups = x.unflatten(-1, (fmt.num_scales(x.shape[-1]), -1))
    amax = groups.abs().amax(-1)
    if fmt.scale_dtype == "e8m0":
        # amax = m * 2**e with m in [1, 2): amax <= 7.5 * 2**s holds from s = e - 2 on where m <= 1.875, else e - 1.
        bits = amax.view(torch.int32)
        byte = ((bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x700000).int()).clamp(formats.E8M0_MIN, formats.E8M0_MAX)
        divisor = (byte << 23).view(torch.float32)
        byte = byte.masked_fill(amax == 0, formats.E8M0_ZERO_BLOCK)
        scales = byte.masked_fill(~amax.isfinite(), formats.E8M0_NAN).to(torch.uint8)
    else:
        # By a tensor: torch divides by a Python number on a GPU by multiplying with its reciprocal.
        divisor = amax / amax.new_tensor(formats.INT8_MAX if fmt.element == "int8" else formats.E2M1_MAGNITUDES[-1])
        scales = divisor.masked_fill(~amax.isfinite(), torch.nan)
    empty = ~amax.isfinite() | (amax == 0) | (divisor == 0)
    scaled = (groups / divisor[..., None]).masked_fill(empty[..., None], 0.0).flatten(-2)
    if fmt.element == "int8":
        return scaled.round().clamp(-formats.INT8_MAX, formats.INT8_MAX).to(torch.int8), scales
    codes = torch.bucketize(scaled.abs(), _e2m1_boundaries().to(x.device), out_int32=True).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


@cache
def _e2m1_boundaries() -> torch.Tensor:
    """float32 ``[7]``: a magnitude's code is the number of boundaries below it. A midpoint is a tie and goes to
    the even code: up where the lower code is odd, hence the boundary just below the midpoint there."""
    magnitudes = torch.tensor(formats.E2M1_MAGNITUDES)
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    midpoints[1::2] = torch.nextafter(midpoints[1::2], torch.tensor(0.0))
    return midpoints


@cache
def _rows(block: HeadBlock) -> torch.Tensor:
    """int64 ``[P]``: the row of the payload tile that holds each token."""
    tokens = range(block.page_size)
    return torch.tensor([int8_k_row(t) if block.format == formats.INT8 else t for t in tokens])


@cache
def _e2m1_pairs() -> torch.Tensor:
    """float64 ``[256]``: the two float32 values of each byte of packed e2m1 codes, as one 8-byte element."""
    magnitudes = torch.tensor(formats.E2M1_MAGNITUDES)
    values = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).view(torch.float64).flatten()


def _tiles(records: torch.Tensor, block: HeadBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload tiles and the scales of records, as typed views that share their memory.

    Returns:
        codes: ``[pages, Hkv, D/16, P, 16]`` int8 for int8 K, ``[pages, Hkv, P/16, D, 16]`` int8 for int8 V,
            ``[pages, Hkv, D/32, P, 16]`` uint8 for the 4-bit formats.
        scales: ``[pages, Hkv, num_scales, P]`` float32, or uint8 E8M0 bytes.
    """
    fmt, end = block.format, block.page_size * block.format.row_nbytes(block.head_dim)
    codes = records[..., : block.payload_nbytes]
    if fmt.element == "int8":
        codes = codes.view(torch.int8)
    inner = (block.head_dim if block.is_token_atom else block.page_size, formats.ATOM_BYTES)
    scales = records[..., block.payload_nbytes : end]
    if fmt.scale_dtype == "float32":
        scales = scales.view(torch.float32)
    return codes.unflatten(-1, (-1, *inner)), scales.unflatten(-1, (-1, block.page_size))


def _read(records: torch.Tensor, block: HeadBlock, pages: torch.Tensor) -> torch.Tensor:
    """float32 ``[Hkv, len(pages) * P, D]``: the pages' rows, dequantized, one page after another."""
    code_tile, scale_tile = _tiles(records[pages], block)
    num_pages, kv_heads = code_tile.shape[:2]
    scales = scale_tile.permute(1, 0, 3, 2)  # [Hkv, pages, P, num_scales]
    if block.format.element == "int8":
        out = records.new_empty(kv_heads, num_pages, block.page_size, block.head_dim, dtype=torch.float32)
        if block.is_token_atom:
            out.unflatten(2, (-1, 16)).copy_(code_tile.permute(1, 0, 2, 4, 3))
        else:
            rows = out.unflatten(3, (-1, formats.ATOM_BYTES)).permute(0, 1, 3, 2, 4)
            rows.copy_(code_tile.transpose(0, 1)[:, :, :, _rows(block).to(records.device)])
    else:
        atoms = code_tile.permute(1, 0, 3, 2, 4).long()  # [Hkv, pages, P, D/32, 16]
        out = torch.take(_e2m1_pairs().to(records.device), atoms).view(torch.float32).flatten(3)
        if block.format.scale_dtype == "e8m0":
            scales = (scales.int() << 23).view(torch.float32).masked_fill(scales == formats.E8M0_NAN, torch.nan)
    out.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None])
    return out.flatten(1, 2)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **params) -> torch.Tensor:
    """Causal attention of one request, as ``reference.attention``, over K ``[Hkv, Tk, D]`` and V ``[Hkv, Tk, Dv]``
    in float32; ``q [Tq, Hq, D]`` are the last of the Tk positions.

    A non-finite V must show in the queries that see it and in no other, but 0 * NaN is NaN. So where a result
    is not finite it is computed again with such a V as a zero value and a NaN score.
    """
    out = _softmax_attention(q, k, v, **params)
    if not out.isfinite().all():
        unsound = ~v.isfinite().all(-1)
        out = _softmax_attention(q, k, v.masked_fill(unsound[..., None], 0.0), unsound=unsound, **params)
    return out


def _softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window_left: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    unsound: torch.Tensor | None = None,
) -> torch.Tensor:
    """``unsound``: bool ``[Hkv, Tk]``, keys whose score is NaN; the rest as ``_attend``."""
    num_queries, num_heads, _ = q.shape
    kv_heads, num_keys, v_dim = v.shape
    group = num_heads // kv_heads
    out = v.new_empty(num_queries, num_heads, v_dim)
    for begin in range(0, num_queries, _QUERY_BLOCK):
        block = q[begin : begin + _QUERY_BLOCK].float()
        # Only the keys that some query of the block sees.
        end = num_keys - num_queries + begin + len(block)
        start = max(0, end - len(block) - window_left) if window_left >= 0 else 0
        grouped = block.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)  # [Hkv, G, Tq, D]
        scores = torch.matmul(grouped.flatten(1, 2), k[:, start:end].transpose(1, 2)).mul_(scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.unflatten(1, (group, -1))
        if unsound is not None:
            scores.masked_fill_(unsound[:, None, None, start:end], torch.nan)
        if len(block) > 1:
            keys = torch.arange(start, end, device=q.device)
            last = torch.arange(end - len(block), end, device=q.device)[:, None]
            hidden = keys > last
            if window_left >= 0:
                hidden |= keys < last - window_left
            scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, len(block), 1)
            scores = torch.cat((scores, column), dim=-1)
        p = scores.softmax(-1)[..., : end - start]
        values = torch.matmul(p.flatten(1, 2), v[:, start:end]).unflatten(1, (group, -1))
        out[begin : begin + len(block)] = values.permute(2, 0, 1, 3).flatten(1, 2)
    return out
