"""Which unit a cache's kernels are in."""

from __future__ import annotations

import functools

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES, HeadBlock
from sglang_quantkv.kernels.build import HEAD_DIMS, Unit
from sglang_quantkv.reference import PagedCache


def unit_of(phase: str, cache: PagedCache) -> Unit:
    """The unit that holds a phase's kernels for this cache.

    Raises:
        UnsupportedConfig: for a head dim without kernels, or K and V of different head dims.
    """
    return _unit(phase, cache.k_block, cache.v_block)


@functools.cache  # asked for at every call of every layer
def _unit(phase: str, k: HeadBlock, v: HeadBlock) -> Unit:
    if k.head_dim != v.head_dim or k.head_dim not in HEAD_DIMS:
        raise UnsupportedConfig(
            f"the {phase} kernel was asked for head_dim {k.head_dim} of K and {v.head_dim} of V",
            f"one head_dim of {', '.join(map(str, HEAD_DIMS))} for both",
            "Serve this model with the torch routes, or with --kv-cache-dtype auto",
        )
    recipe = next(r.name for r in RECIPES.values() if (r.k, r.v) == (k.format, v.format))
    return Unit(phase, recipe, k.head_dim, k.page_size)
