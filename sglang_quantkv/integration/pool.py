"""SGLang's MHA KV pool over packed records: one uint8 tensor per layer for K and one for V.

A buffer is ``[pages, Hkv, head block bytes]``; see ``formats`` for what is inside. What moves whole pages
(PD transfer, HiCache) works on these tensors as they are; what touches single slots (writes, slot moves,
host copies of a request) goes through the functions below, which take codes and scales together.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, cached_property
from typing import ClassVar

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, unwrap_write_loc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.platforms import current_platform
from sglang.srt.utils.async_probe import maybe_detect_oob

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import HeadBlock, Operand, Recipe
from sglang_quantkv.integration.implementation import routes_of
from sglang_quantkv.reference import PagedCache


@cache
def pool_class(recipe: Recipe) -> type[QuantKVPool]:
    """The pool class of a recipe. SGLang constructs it as it would its own, with no argument for a recipe."""
    return type(f"QuantKVPool[{recipe.name}]", (QuantKVPool,), {"recipe": recipe})


class QuantKVPool(MHATokenToKVPool):
    """Constructed through ``pool_class``, with the arguments of ``MHATokenToKVPool``.

    Raises:
        UnsupportedConfig: for a page size or head dim without a record layout, or a buffer layout that
            is not SGLang's plain one.
    """

    recipe: ClassVar[Recipe]

    def __init__(self, size: int, page_size: int, *args, **kwargs):
        if kwargs.get("post_capture_active"):
            raise UnsupportedConfig(
                "post-capture KV sizing (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING) has no packed pool",
                "a pool sized at start-up, SGLang's default",
                "Unset the variable",
            )
        super().__init__(size, page_size, *args, **kwargs)
        if self.use_hnd or self.kv_cache_layout != "nhd":
            raise UnsupportedConfig(
                f"KV layout {self.kv_cache_layout!r} (SGLANG_USE_HND_KVCACHE, SGLANG_AITER_KV_CACHE_LAYOUT)",
                "the packed records of sglang_quantkv",
                "Unset the variables",
            )

    # ---- allocation and sizes ----------------------------------------------------------------------

    @cached_property
    def k_block(self) -> HeadBlock:
        return self.recipe.block(Operand.K, self.head_dim, self.page_size)

    @cached_property
    def v_block(self) -> HeadBlock:
        return self.recipe.block(Operand.V, self.v_head_dim, self.page_size)

    def _kv_buffer_shapes(self):
        pages = (self.size + self.page_size) // self.page_size
        return (pages, self.head_num, self.k_block.nbytes), (pages, self.head_num, self.v_block.nbytes)

    def _kv_tokens_per_row(self) -> int:
        return self.page_size

    def _create_buffers_normal(self):
        custom = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), custom:
            self.k_buffer, self.v_buffer = (
                [torch.zeros(shape, dtype=self.store_dtype, device=self.device) for _ in range(self.layer_num)]
                for shape in self._kv_buffer_shapes()
            )

    def _mha_buffer_info(self):
        """For host copies of whole pages: a record seen as ``P`` rows of ``Hkv`` heads, each an equal share of
        the record's bytes. A row is not a token's bytes; only whole pages may be copied by it."""
        import msgspec

        info = super()._mha_buffer_info()
        slots = self.size + self.page_size
        buffers = msgspec.structs.replace(
            info.buffers,
            k=tuple(b.view(slots, self.head_num, -1) for b in self.k_buffer),
            v=tuple(b.view(slots, self.head_num, -1) for b in self.v_buffer),
        )
        return msgspec.structs.replace(
            info,
            buffers=buffers,
            head_num=self.head_num,
            head_dim=self.k_block.nbytes_per_token,
            v_head_dim=self.v_block.nbytes_per_token,
        )

    # ---- writes ------------------------------------------------------------------------------------

    def paged_cache(self, layer_id: int) -> PagedCache:
        """The packed pages of a layer, by its index in this pool."""
        index = layer_id - self.start_layer
        return PagedCache(self.k_buffer[index], self.v_buffer[index], self.k_block, self.v_block)

    def set_kv_buffer(
        self,
        layer,
        loc_info,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale=None,
        v_scale=None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ):
        """Quantizes K ``[n, Hkv, D]`` and V ``[n, Hkv, Dv]`` and writes them into their slots.

        ``k_scale`` and ``v_scale`` are a checkpoint's static scales; recipes here compute their own, so
        they are ignored (and always 1.0 or None for caches that are not fp8). The inputs are not modified.
        """
        if dcp_kv_mask is not None:
            raise UnsupportedConfig(
                "decode context parallelism (--dcp-size) splits a token's KV over ranks", "--dcp-size 1", "Leave it out"
            )
        loc, _, _ = unwrap_write_loc(loc_info)
        maybe_detect_oob(loc, 0, self.size + self.page_size, "set_kv_buffer (quantkv)")
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        routes_of(self.device).store(self.paged_cache(layer_id), loc.long(), cache_k, cache_v)

    def set_kv_buffer_prefix_valid(
        self,
        layer,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale=None,
        v_scale=None,
        layer_id_override: int | None = None,
    ):
        """Writes each request's first ``commit_lens[i]`` of its ``loc_2d[i]`` rows, ``[requests, steps]``; the
        others go to slot 0, the dummy that nothing reads, so that no shape depends on data."""
        steps = torch.arange(loc_2d.shape[1], device=loc_2d.device)
        loc = torch.where(steps < commit_lens.to(loc_2d.device)[:, None], loc_2d, 0).flatten()
        self.set_kv_buffer(layer, loc, cache_k, cache_v, layer_id_override=layer_id_override)

    # ---- single slots ------------------------------------------------------------------------------

    def _init_kv_copy_and_warmup(self):
        # SGLang's tiled copy moves rows of a buffer, which are pages here; move_kv_cache does not use it.
        self._kv_copy_config = None

    @property
    def _caches(self) -> list[PagedCache]:
        return [self.paged_cache(self.start_layer + index) for index in range(self.layer_num)]

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor):
        """Copies slots ``src_loc [n]`` to ``tgt_loc [n]`` in every layer, codes and scales; the sets may overlap."""
        src_loc, tgt_loc = src_loc.long(), tgt_loc.long()
        routes = routes_of(self.device)
        for layer in self._caches:
            routes.write_rows(layer, tgt_loc, *routes.read_rows(layer, src_loc))

    def get_cpu_copy(self, indices, mamba_indices=None, req_pool_index=None):
        """The rows of slots ``indices [n]``: per layer and chunk ``[K, V]``, uint8 ``[m, Hkv, row bytes]`` on the host.
        The slots may be restored into others, at any place in their pages."""
        current_platform.synchronize()
        routes, chunks = routes_of(self.device), indices.long().split(self.cpu_offloading_chunk_size)
        copies = [
            [[rows.to("cpu", non_blocking=True) for rows in routes.read_rows(layer, chunk)] for chunk in chunks]
            for layer in self._caches
        ]
        current_platform.synchronize()
        return copies

    def load_cpu_copy(self, kv_cache_cpu, indices, mamba_indices=None, req_pool_index=None):
        """Writes what ``get_cpu_copy`` returned into slots ``indices [n]``."""
        current_platform.synchronize()
        routes, chunks = routes_of(self.device), indices.long().split(self.cpu_offloading_chunk_size)
        for layer, copies in zip(self._caches, kv_cache_cpu, strict=True):
            for chunk, rows in zip(chunks, copies, strict=True):
                routes.write_rows(layer, chunk, *(r.to(self.device, non_blocking=True) for r in rows))
        current_platform.synchronize()


def sub_pools(pool) -> list[tuple[str, object]]:
    """The pools that hold attention KV in one of SGLang's: itself, or the parts of a composite, named."""
    if isinstance(pool, SWAKVPool):
        return [("full", pool.full_kv_pool), ("sliding-window", pool.swa_kv_pool)]
    if isinstance(pool, HybridLinearKVPool):
        return [("full", pool.full_kv_pool)]
    return [("all", pool)]


def is_sliding_window_layer(pool, layer_id: int) -> bool:
    """Whether a layer of the model keeps its KV in the smaller pool for its window."""
    return isinstance(pool, SWAKVPool) and pool.layers_mapping[layer_id][1]


def layer_cache(pool, layer_id: int) -> PagedCache:
    """The packed pages of a layer of the model, in a ``QuantKVPool`` or in a composite of them; waits for the layer
    where a host copy is being loaded."""
    part = pool
    if isinstance(pool, SWAKVPool):
        part = pool.swa_kv_pool if is_sliding_window_layer(pool, layer_id) else pool.full_kv_pool
    elif isinstance(pool, HybridLinearKVPool):
        part = pool.full_kv_pool
    return PagedCache(*pool.get_kv_buffer(layer_id), part.k_block, part.v_block)
