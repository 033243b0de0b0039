"""What the layers of one forward pass share: lengths, page tables, plans; for batches of any size and for graphs.

A decode step's metadata is a function of device tensors alone, so that a captured graph computes it anew at every
replay, with nothing read back to the host. A batch of chunks has its lengths on the host, where the scheduler cut it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from sglang_quantkv.kernels.routes import Chunks, KernelDesc, Routes, upload
from sglang_quantkv.reference import PagedCache


class LayerKind(NamedTuple):
    """Layers of a kind share the plan of a batch.

    Attributes:
        in_window_pool: whether they cache in the pool of sliding-window layers.
        window_left: earlier tokens that a query sees; -1 for all.
        group: query heads per KV head.
    """

    in_window_pool: bool
    window_left: int
    group: int


@dataclass
class Tables:
    """The tensors of a batch of requests that captured graphs find at the same address at every replay.

    Attributes:
        seq_lens: int32 ``[requests]``, the tokens of this pass included.
        pages: int32 ``[requests, max_pages]``; ``window_pages`` those in the pool of sliding-window layers, or None
            where the model has no such pool.
    """

    seq_lens: Tensor
    pages: Tensor
    window_pages: Tensor | None

    def first(self, requests: int) -> Tables:
        """Views of the first rows."""
        window_pages = None if self.window_pages is None else self.window_pages[:requests]
        return Tables(self.seq_lens[:requests], self.pages[:requests], window_pages)

    def pages_of(self, kind: LayerKind) -> Tensor:
        return self.window_pages if kind.in_window_pool else self.pages

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.seq_lens, self.pages, self.window_pages) if t is not None)


@dataclass
class Part:
    """The requests of a batch of chunks that go one way.

    Attributes:
        route: a name of ``Routes.partition``.
        rows: int64, their tokens' rows in the batch; None: all of them.
        chunks, tables: theirs.
        plans: by kind of layer, of the routes that have one.
    """

    route: str
    rows: Tensor | None
    chunks: Chunks
    tables: Tables
    plans: dict[LayerKind, Any] = field(default_factory=dict)


@dataclass
class DecodeMetadata:
    """Of a decode step.

    Attributes:
        window_loc: where its tokens go in the sliding-window pool, or None.
        calls: that one replay of the step makes, if it is captured.
    """

    tables: Tables
    plans: dict[LayerKind, Any]
    window_loc: Tensor | None = None
    calls: Counter[KernelDesc] = field(default_factory=Counter)


@dataclass
class ExtendMetadata:
    """Of a batch of chunks. Its parts differ for layers that read another layer's K and V: all of those is cached."""

    tables: Tables
    window_loc: Tensor | None
    seq_lens: list[int]
    q_lens: list[int]
    routes: Routes

    @cached_property
    def parts(self) -> list[Part]:
        return self._parts(owns_kv=True)

    @cached_property
    def parts_without_kv(self) -> list[Part]:
        return self._parts(owns_kv=False)

    def _parts(self, owns_kv: bool) -> list[Part]:
        device = self.tables.seq_lens.device
        routed = self.routes.partition(self.seq_lens, self.q_lens, owns_kv)
        starts = [0]
        for length in self.q_lens:
            starts.append(starts[-1] + length)
        parts = []
        for route, requests in routed.items():
            chunks = Chunks.of([self.seq_lens[i] for i in requests], [self.q_lens[i] for i in requests], device)
            rows, tables = None, self.tables
            if len(routed) > 1:
                rows = upload([row for i in requests for row in range(starts[i], starts[i + 1])], torch.int64, device)
                index = upload(requests, torch.int64, device)
                window_pages = None if tables.window_pages is None else tables.window_pages[index]
                tables = Tables(tables.seq_lens[index], tables.pages[index], window_pages)
            parts.append(Part(route, rows, chunks, tables))
        return parts


class MetadataBuilder:
    """Builds the metadata of a model's batches.

    Args:
        samples: a layer's cache of each kind.
    """

    def __init__(self, model_runner, routes: Routes, samples: Mapping[LayerKind, PagedCache]):
        self.routes, self.samples = routes, samples
        self.device = model_runner.device
        self.page_size = model_runner.page_size
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        pool = model_runner.token_to_kv_pool
        self.to_window = pool.translate_loc_from_full_to_swa if isinstance(pool, SWAKVPool) else None
        self.page_starts = torch.arange(0, self.req_to_token.shape[1], self.page_size, device=self.device)

    def allocate(self, requests: int, max_tokens: int | None = None) -> Tables:
        """Tables for so many requests of up to ``max_tokens``; the most that the pool of requests allows if None."""
        pages = len(self.page_starts) if max_tokens is None else -(-max_tokens // self.page_size)
        seq_lens = torch.empty(requests, dtype=torch.int32, device=self.device)
        tables = [torch.empty(requests, pages, dtype=torch.int32, device=self.device) for _ in range(2)]
        return Tables(seq_lens, tables[0], tables[1] if self.to_window else None)

    def fill(self, tables: Tables, req_pool_indices: Tensor, seq_lens: Tensor) -> None:
        """Looks up the requests' pages, on the device. Entries past a request's last page may be anything."""
        tables.seq_lens.copy_(seq_lens)
        starts = self.page_starts[: tables.pages.shape[1]]
        first_slots = self.req_to_token[req_pool_indices[:, None], starts]
        torch.div(first_slots, self.page_size, rounding_mode="floor", out=tables.pages)
        if self.to_window:
            tables.window_pages.copy_(self.to_window(first_slots) // self.page_size)

    def window_loc(self, loc: Tensor) -> Tensor | None:
        return self.to_window(loc) if self.to_window else None

    def plan(self, seq_lens: Tensor) -> dict[LayerKind, Any]:
        """Plans of a decode step."""
        return {
            kind: self.routes.plan_decode(cache, seq_lens, kind.group, kind.window_left)
            for kind, cache in self.samples.items()
        }

    def decode(self, forward_batch) -> DecodeMetadata:
        """Of a decode step outside of graphs."""
        longest = forward_batch.seq_lens_cpu
        max_tokens = None if longest is None else int(longest.max())
        tables = self.allocate(len(forward_batch.seq_lens), max_tokens)
        self.fill(tables, forward_batch.req_pool_indices, forward_batch.seq_lens)
        return DecodeMetadata(tables, self.plan(tables.seq_lens), self.window_loc(forward_batch.out_cache_loc))

    def extend(self, forward_batch) -> ExtendMetadata:
        """Of a batch of chunks."""
        q_lens = list(forward_batch.extend_seq_lens_cpu)
        seq_lens = [own + cached for own, cached in zip(q_lens, forward_batch.extend_prefix_lens_cpu)]
        tables = self.allocate(len(seq_lens), max(seq_lens))
        self.fill(tables, forward_batch.req_pool_indices, forward_batch.seq_lens)
        window_loc = self.window_loc(forward_batch.out_cache_loc)
        return ExtendMetadata(tables, window_loc, seq_lens, q_lens, self.routes)
