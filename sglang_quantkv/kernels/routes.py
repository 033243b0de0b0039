"""Which implementation runs each phase, and how often each one ran.

A phase is one of ``store``, ``first_chunk``, ``extend``, ``decode``. Every call is counted under the
descriptor of the kernel that ran, so that a server can prove what it served with.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import torch

from sglang_quantkv.formats import RECIPES, HeadBlock
from sglang_quantkv.kernels import torch_routes
from sglang_quantkv.reference import PagedCache

PHASES = ("store", "first_chunk", "extend", "decode")

# Calls since start-up, by descriptor.
calls: Counter[KernelDesc] = Counter()


@dataclass(frozen=True)
class KernelDesc:
    """What a kernel is chosen by; its text is the log line, the metric label and the test id."""

    phase: str
    implementation: str
    recipe: str
    head_dim: int
    v_head_dim: int
    page_size: int

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        return f"{self.phase}_{self.recipe}_{dims}_p{self.page_size}_{self.implementation}"


def describe(phase: str, cache: PagedCache) -> KernelDesc:
    """The kernel that runs a phase on this cache."""
    return _describe(phase, cache.k_block, cache.v_block)


@functools.cache  # asked for at every call of every layer
def _describe(phase: str, k: HeadBlock, v: HeadBlock) -> KernelDesc:
    recipe = next(r.name for r in RECIPES.values() if (r.k, r.v) == (k.format, v.format))
    return KernelDesc(phase, "torch", recipe, k.head_dim, v.head_dim, k.page_size)


def store(cache: PagedCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Quantizes and writes K and V; see ``torch_routes.store``."""
    calls[describe("store", cache)] += 1
    torch_routes.store(cache, slots, k, v)


def first_chunk(cache: PagedCache, q, k, v, q_lens: list[int], **params) -> torch.Tensor:
    """Attention of requests without a cached prefix, in high precision; see ``reference.first_chunk``.

    ``cache`` is the layer's; it is described, not read.
    """
    calls[describe("first_chunk", cache)] += 1
    return torch_routes.first_chunk(q, k, v, q_lens, **params)


def extend(cache: PagedCache, q, page_table, seq_lens: list[int], q_lens: list[int], **params) -> torch.Tensor:
    """Attention of requests' last tokens over packed pages; see ``reference.extend``."""
    calls[describe("extend", cache)] += 1
    return torch_routes.extend(q, cache, page_table, seq_lens, q_lens, **params)


def decode(cache: PagedCache, q, page_table, seq_lens: list[int], **params) -> torch.Tensor:
    """Attention of one query per request over packed pages; see ``reference.decode``."""
    calls[describe("decode", cache)] += 1
    return torch_routes.decode(q, cache, page_table, seq_lens, **params)
