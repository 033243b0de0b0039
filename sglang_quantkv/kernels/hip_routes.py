"""The routes of a GPU: every phase by the kernels of ``hip/``, first chunks by the best dense attention around.

New tokens behind a short cached prefix take another way: their pages are dequantized into a workspace, and dense
attention runs over that. It is exact in what the pages hold, its workspace is bounded, and below some length of
prefix it is faster; hip/PERFORMANCE.md has the measurement. Longer prefixes are read packed.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels import build, decode, extend, store, torch_routes
from sglang_quantkv.kernels.dense import DenseAttention, DenseBatch
from sglang_quantkv.kernels.dequantize import dequantize
from sglang_quantkv.kernels.routes import Chunks, NormRope, Routes, upload
from sglang_quantkv.kernels.slots import gather, scatter
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.units import unit_of
from sglang_quantkv.reference import PagedCache


@dataclass(frozen=True)
class DequantizePlan:
    """Which tokens of each request are dequantized, and to which rows of the workspace.

    Attributes:
        begins, ends, row_starts: int32 ``[requests]``, as for ``dequantize``.
        rows: their number.
        batch: the rows as dense attention takes them.
    """

    begins: Tensor
    ends: Tensor
    row_starts: Tensor
    rows: int
    batch: DenseBatch


class HipRoutes(Routes):
    """
    Args:
        target: whose kernels run.
        dense: of first chunks; None on the emulation, which has torch for that.
        extend_from: cached tokens from which a request's pages are read packed.
    """

    stores_with_norm_rope = True

    def __init__(self, target: Target, dense: DenseAttention | None, extend_from: int):
        super().__init__()
        self.target, self.dense = target, dense
        self.extend_from = extend_from if dense is not None and dense.reads_prefix else 0
        self._rows: tuple[Tensor, Tensor] | None = None  # K and V of dequantized tokens, flat
        self._row_capacity = 0
        self._scratch: list[Tensor] = []  # of decode; the last is the largest, earlier ones are in captured graphs

    def implementations(self, phase):
        dense = "torch" if self.dense is None else self.dense.name
        match phase:
            case "first_chunk":
                return (dense,)
            case "extend":
                return (self.target.name, f"dequantize+{dense}") if self.extend_from else (self.target.name,)
        return (self.target.name,)

    @property
    def workspace_nbytes(self):
        return sum(t.nbytes for t in (*self._scratch, *(self._rows or ())))

    def prepare(self, caches: Iterable[PagedCache], dtype: torch.dtype, max_chunk_tokens: int) -> None:
        """Builds and loads what these caches need, and takes the memory for dequantized tokens.

        Raises:
            UnsupportedConfig: for a dtype without kernels, or when this machine cannot build one.
            RuntimeError: when one does not compile or load. Both name the kernel.
        """
        if dtype not in (torch.bfloat16, torch.float16):
            raise UnsupportedConfig(
                f"a model in {str(dtype).removeprefix('torch.')} on {self.target}",
                "bfloat16 and float16",
                "Serve it with --dtype bfloat16, or slowly with --quantkv-reference",
            )
        caches = list(caches)
        phases = ("store", "decode", "extend", "slots", *(("dequantize",) if self.extend_from else ()))
        units = dict.fromkeys(unit_of(phase, cache) for cache in caches for phase in phases)
        with ThreadPoolExecutor(len(units)) as pool:  # compilers are processes of their own
            list(pool.map(self._load, units))
        if self.extend_from:
            self._row_capacity = self.extend_from + max_chunk_tokens
            row = max(cache.k_records.shape[1] * cache.k_block.head_dim for cache in caches)
            device = caches[0].k_records.device
            self._rows = tuple(torch.empty(self._row_capacity * row, dtype=dtype, device=device) for _ in range(2))

    def _load(self, unit: build.Unit) -> None:
        try:
            build.load(unit, self.target)
        except UnsupportedConfig as error:
            asked = f"kernel {unit} for {self.target}: {error.asked}"
            raise UnsupportedConfig(asked, error.supported, error.advice) from error
        except Exception as error:
            raise RuntimeError(f"sglang_quantkv: kernel {unit} for {self.target} cannot be had: {error}") from error

    # ---- store -----------------------------------------------------------------------------------------

    def store(self, cache, slots, k, v):
        self.count("store", self.target.name, cache)
        store.store(cache, slots, k, v, target=self.target)

    def prepare_and_store(self, cache, slots, q, k, v, positions, norm_rope: NormRope, keeps_k):
        self.count("store", self.target.name, cache)
        store.store(
            cache, slots, k, v, q, positions=positions, cos_sin=norm_rope.cos_sin, interleaved=norm_rope.interleaved,
            q_weight=norm_rope.q_weight, k_weight=norm_rope.k_weight, weight_offset=norm_rope.weight_offset,
            eps=norm_rope.eps, q_out=q, k_out=k if keeps_k else None, target=self.target,
        )  # fmt: skip

    def read_rows(self, cache, slots):
        return gather(cache, slots, target=self.target)

    def write_rows(self, cache, slots, k_rows, v_rows):
        scatter(cache, slots, k_rows, v_rows, target=self.target)

    # ---- decode ----------------------------------------------------------------------------------------

    def plan_decode(self, cache, seq_lens, group, window_left) -> decode.DecodePlan:
        layout = decode.decode_layout(cache, group, target=self.target)
        elements = layout.scratch_elements(len(seq_lens), cache.k_records.shape[1], cache.k_block.head_dim)
        if not self._scratch or len(self._scratch[-1]) < elements:
            self._scratch.append(torch.empty(elements, dtype=torch.float32, device=seq_lens.device))
        return decode.plan(
            cache, seq_lens, group, window_left=window_left, scratch=self._scratch[-1], target=self.target
        )

    def decode(self, cache, q, page_table, seq_lens, plan: decode.DecodePlan, *, window_left, **params):
        self.count("decode", self.target.name, cache)
        return decode.decode(cache, q, page_table, seq_lens, plan, **_float32_sinks(params), target=self.target)

    # ---- chunks ----------------------------------------------------------------------------------------

    def first_chunk(self, cache, q, k, v, chunks: Chunks, **params):
        (name,) = self.implementations("first_chunk")
        self.count("first_chunk", name, cache)
        if self.dense is None:
            return torch_routes.first_chunk(q, k, v, chunks.q_lens, **params).to(q.dtype)
        longest = max(chunks.q_lens)
        return self.dense(q, k, v, DenseBatch(chunks.query_starts, chunks.query_starts, longest, longest), **params)

    def extend(self, cache, q, page_table, chunks: Chunks, **params):
        self.count("extend", self.target.name, cache)
        return extend.extend(
            cache, q, page_table, chunks.device_seq_lens, chunks.query_starts, **_float32_sinks(params),
            target=self.target,
        )  # fmt: skip

    def partition(self, seq_lens, q_lens, owns_kv):
        parts = super().partition(seq_lens, q_lens, owns_kv)
        if not self.extend_from or "extend" not in parts:
            return parts
        short, free = [], self._row_capacity
        for request in parts["extend"]:
            if seq_lens[request] - q_lens[request] < self.extend_from and seq_lens[request] <= free:
                short.append(request)
                free -= seq_lens[request]
        long = sorted(set(parts["extend"]) - set(short))
        return {
            phase: requests for phase, requests in (parts | {"extend": long, "dequantized": short}).items() if requests
        }

    def plan_dequantized(self, chunks: Chunks, window_left: int) -> DequantizePlan:
        """What layers of a window share; done on the host, since its lengths are there."""
        begins = [
            max(0, seq - q - window_left) if window_left >= 0 else 0 for seq, q in zip(chunks.seq_lens, chunks.q_lens)
        ]
        lengths = [seq - begin for seq, begin in zip(chunks.seq_lens, begins)]
        starts, count = list(accumulate(lengths, initial=0)), len(begins)
        both = upload(begins + starts, torch.int32, chunks.query_starts.device)
        k_starts = both[count:]
        batch = DenseBatch(chunks.query_starts, k_starts, max(chunks.q_lens), max(lengths))
        return DequantizePlan(both[:count], chunks.device_seq_lens, k_starts[:-1], starts[-1], batch)

    def dequantized(self, cache, q, page_table, plan: DequantizePlan, **params):
        """As ``extend``, over dequantized pages."""
        self.count("extend", f"dequantize+{self.dense.name}", cache)
        heads, head_dim = cache.k_records.shape[1], cache.k_block.head_dim
        # No row more than was written: what attention loads behind them must be zeros, which NaN in memory are not.
        k, v = (rows[: plan.rows * heads * head_dim].view(-1, heads, head_dim) for rows in self._rows)
        dequantize(
            cache, page_table, plan.begins, plan.ends, plan.row_starts, k, v, plan.batch.max_k, target=self.target
        )
        return self.dense(q, k, v, plan.batch, **params)


def _float32_sinks(params: dict) -> dict:
    sinks = params["sinks"]
    return params if sinks is None else params | {"sinks": sinks.float()}
