"""Whether one of SGLang's objects stores its KV cache in a recipe of ours, and which."""

from __future__ import annotations

import torch

from sglang_quantkv.formats import Recipe, find_recipe, is_recipe

# One byte per element and nothing that SGLang gives a meaning to: every inherited code path that looks
# at the dtype sees opaque bytes.
STORE_DTYPE = torch.uint8


def recipe_of(owner) -> Recipe | None:
    """The recipe of a ModelRunner or a KVCacheConfigurator, or None when its cache is SGLang's own.

    Both the name and the dtype must be ours: a draft model inherits the target's name while its cache
    has another dtype.
    """
    name = owner.kv_cache_dtype_str
    if is_recipe(name) and owner.kv_cache_dtype == STORE_DTYPE:
        return find_recipe(name)
    return None
