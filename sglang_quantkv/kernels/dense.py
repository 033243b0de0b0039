"""Attention over K and V that are not packed: for first chunks, and for prefixes that were dequantized.

What a GPU has of it are SGLang's kernels and those of its dependencies, so ``integration/dense.py`` adapts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class DenseBatch:
    """Where the requests of a ragged batch lie in Q, and in K and V.

    Attributes:
        q_starts, k_starts: int32 ``[requests + 1]``, the last entry the number of rows.
        max_q, max_k: rows of the longest request.
    """

    q_starts: Tensor
    k_starts: Tensor
    max_q: int
    max_k: int


class DenseAttention(Protocol):
    """An implementation for one machine.

    Attributes:
        name: in descriptors.
        reads_prefix: whether a request may have more rows of K and V than of Q, which are then its last ones.
    """

    name: str
    reads_prefix: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: DenseBatch, **params) -> Tensor:
        """Causal attention, ``[tokens, Hq, D]`` over ``[rows, Hkv, D]``; params as ``reference.attention``."""
