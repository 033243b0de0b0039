"""What a server does with packed pages, phase by phase, and how often each kernel ran.

``Routes`` is what the attention backend and the pool call. ``torch_routes.TorchRoutes`` computes in plain torch on any
device, ``hip_routes.HipRoutes`` with the kernels of ``hip/``. Every call is counted under the descriptor of the kernel
that ran, so that a server can prove what it served with.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sglang_quantkv.formats import RECIPES, HeadBlock
from sglang_quantkv.reference import PagedCache

PHASES = ("store", "first_chunk", "extend", "decode")


@dataclass(frozen=True)
class KernelDesc:
    """What ran a phase; its text is the log line, the metric label and the test id."""

    phase: str
    implementation: str
    recipe: str
    head_dim: int
    v_head_dim: int
    page_size: int

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        return f"{self.phase}_{self.recipe}_{dims}_p{self.page_size}_{self.implementation}"


@functools.cache  # asked for at every call of every layer
def describe(phase: str, implementation: str, k: HeadBlock, v: HeadBlock) -> KernelDesc:
    """The descriptor of what runs a phase on such records."""
    recipe = next(r.name for r in RECIPES.values() if (r.k, r.v) == (k.format, v.format))
    return KernelDesc(phase, implementation, recipe, k.head_dim, v.head_dim, k.page_size)


def upload(values: list[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Copies host values to a device without waiting for what runs there."""
    on_gpu = torch.device(device).type != "cpu"
    return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=True)


@dataclass(frozen=True)
class Chunks:
    """The new tokens of some requests: the last ``q_lens[i]`` of each one's ``seq_lens[i]`` tokens.

    Attributes:
        seq_lens, q_lens: on the host.
        device_seq_lens: int32 ``[requests]``.
        query_starts: int32 ``[requests + 1]``: where each request's new tokens begin, and their number.
    """

    seq_lens: list[int]
    q_lens: list[int]
    device_seq_lens: Tensor
    query_starts: Tensor

    @classmethod
    def of(cls, seq_lens: list[int], q_lens: list[int], device: torch.device | str) -> Chunks:
        """Copies the lengths to the device."""
        starts = list(accumulate(q_lens, initial=0))
        both = upload(seq_lens + starts, torch.int32, device)
        return cls(seq_lens, q_lens, both[: len(seq_lens)], both[len(seq_lens) :])


@dataclass(frozen=True)
class NormRope:
    """What a layer does to Q and K before attention, so that the store can do it: norm per head, rotary embedding.

    Attributes:
        cos_sin, interleaved: as for ``reference.rotate``.
        q_weight, k_weight: ``[D]``, the norms' own parameters; None for a layer without norms.
        weight_offset: added to the weights: 1 for Gemma's norms.
        eps: of the norms.
    """

    cos_sin: Tensor
    interleaved: bool
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    weight_offset: float = 0.0
    eps: float = 1e-6


class Routes(ABC):
    """The phases of a batch. ``params`` are ``scale``, ``window_left``, ``softcap`` and ``sinks`` as for
    ``reference.attention``. Queries are ``[tokens, Hq, D]``, results ``[tokens, Hq, Dv]``.

    Attributes:
        stores_with_norm_rope: whether there is a ``prepare_and_store``; else layers do these steps themselves.
        calls: since start-up, by descriptor.
        tally: where calls are counted right now: ``calls``, or those of a step that is captured in a graph, which count
            when it is replayed.
    """

    stores_with_norm_rope = False

    def __init__(self) -> None:
        self.calls: Counter[KernelDesc] = Counter()
        self.tally = self.calls

    @abstractmethod
    def implementations(self, phase: str) -> tuple[str, ...]:
        """Names of what may run a phase."""

    def describe(self, phase: str, cache: PagedCache) -> list[KernelDesc]:
        """What may run a phase on this cache."""
        return [describe(phase, name, cache.k_block, cache.v_block) for name in self.implementations(phase)]

    def count(self, phase: str, implementation: str, cache: PagedCache) -> None:
        """Notes a call; every route does."""
        self.tally[describe(phase, implementation, cache.k_block, cache.v_block)] += 1

    def prepare(self, caches: Iterable[PagedCache], dtype: torch.dtype, max_chunk_tokens: int) -> None:
        """Before the first call: gets ready for layers with such caches, whose Q, K and V have this dtype, and for
        batches of up to so many new tokens."""

    @property
    def workspace_nbytes(self) -> int:
        """Device memory beside the pool that the routes hold on to."""
        return 0

    @abstractmethod
    def store(self, cache: PagedCache, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Quantizes K ``[n, Hkv, D]`` and V ``[n, Hkv, Dv]`` and writes them into ``slots``, int64 ``[n]``."""

    def prepare_and_store(
        self,
        cache: PagedCache,
        slots: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        norm_rope: NormRope,
        keeps_k: bool,
    ) -> None:
        """Norms and rotates Q and K, then does as ``store``. Q is changed in place, K too if ``keeps_k``."""
        raise NotImplementedError

    @abstractmethod
    def read_rows(self, cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 ``[n, Hkv, row_nbytes]`` of K and of V: codes and scales of single slots, int64 ``[n]``."""

    @abstractmethod
    def write_rows(self, cache: PagedCache, slots: Tensor, k_rows: Tensor, v_rows: Tensor) -> None:
        """Writes what ``read_rows`` returned into slots, no two of them equal."""

    @abstractmethod
    def plan_decode(self, cache: PagedCache, seq_lens: Tensor, group: int, window_left: int) -> Any:
        """What the layers of such a cache share in one decode step; ``seq_lens`` is int32 ``[requests]``."""

    @abstractmethod
    def decode(self, cache: PagedCache, q: Tensor, page_table: Tensor, seq_lens: Tensor, plan: Any, **params) -> Tensor:
        """One query per request over packed pages. ``page_table`` is int32 ``[requests, max_pages]``. A request of
        length 0 gets zeros."""

    def partition(self, seq_lens: list[int], q_lens: list[int], owns_kv: bool) -> dict[str, list[int]]:
        """Which requests of a batch of chunks go which way: their indices, ascending, by the name of a method.

        A single new token is decoded, whatever batch it is in.

        Args:
            owns_kv: whether the layer has K and V of its own; one that reads another layer's finds all in pages.
        """
        parts: dict[str, list[int]] = {}
        for request, (seq, own) in enumerate(zip(seq_lens, q_lens)):
            route = "first_chunk" if seq == own and owns_kv else "decode" if own == 1 else "extend"
            parts.setdefault(route, []).append(request)
        return parts

    @abstractmethod
    def first_chunk(self, cache: PagedCache, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, **params) -> Tensor:
        """Requests without a cached prefix attend to their own unquantized K and V, in high precision. The cache is
        described, not read."""

    @abstractmethod
    def extend(self, cache: PagedCache, q: Tensor, page_table: Tensor, chunks: Chunks, **params) -> Tensor:
        """Requests' new tokens attend to packed pages; their own K and V are in them already."""
