"""SGLang's attention backend over packed pages: writes the batch's K and V, then sends each request its way.

A request without a cached prefix attends to its own unquantized K and V; every other one reads packed
pages, the current chunk included, whatever brought the prefix (an earlier chunk, a radix hit).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_quantkv.errors import refuse_first
from sglang_quantkv.integration.pool import is_sliding_window_layer, layer_cache
from sglang_quantkv.integration.selection import recipe_of
from sglang_quantkv.kernels import routes
from sglang_quantkv.reference import PagedCache


@dataclass
class BatchMetadata:
    """What every layer of one forward pass shares.

    Attributes:
        seq_lens: tokens of each request, the ones of this pass included.
        q_lens: tokens of each request in this pass.
        page_table: int ``[requests, max pages]`` page ids; ``swa_page_table`` those of the sliding-window
            pool, or None where the model has no such pool.
        swa_out_cache_loc: where this pass's tokens go in the sliding-window pool, or None.
    """

    seq_lens: list[int]
    q_lens: list[int]
    page_table: torch.Tensor
    swa_page_table: torch.Tensor | None
    swa_out_cache_loc: torch.Tensor | None


class QuantKVAttnBackend(AttentionBackend):
    """Attention for models whose pool is ``QuantKVPool``, plain or inside SGLang's composite pools.

    Raises:
        UnsupportedConfig: when a layer of the model computes attention that the routes do not.
    """

    def __init__(self, model_runner):
        super().__init__()
        assert recipe_of(model_runner) is not None, "built only for a runner whose cache is ours"
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.page_size = model_runner.page_size
        self.max_context_len = model_runner.model_config.context_len
        self.forward_metadata: BatchMetadata | None = None
        for module in model_runner.model.modules():
            if isinstance(module, RadixAttention):
                check_layer(module, self.token_to_kv_pool)

    def get_cuda_graph_seq_len_fill_value(self):
        # What SGLang pads a batch's sequence lengths with: a padded row reads one token of the dummy page.
        return 1

    def init_forward_metadata(self, forward_batch):
        """Reads the batch's lengths and page ids, once per forward pass."""
        if forward_batch.forward_mode.is_idle():
            return
        seq_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode():
            q_lens = [1] * len(seq_lens)
        else:
            q_lens = list(forward_batch.extend_seq_lens_cpu)
        first_slots = self.req_to_token_pool.req_to_token[
            forward_batch.req_pool_indices, : max(seq_lens, default=0) : self.page_size
        ].long()
        swa_page_table = swa_out_cache_loc = None
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            swa_page_table = translate(first_slots) // self.page_size
            swa_out_cache_loc = translate(forward_batch.out_cache_loc)
        self.forward_metadata = BatchMetadata(
            seq_lens, q_lens, first_slots // self.page_size, swa_page_table, swa_out_cache_loc
        )

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        """One query per request; shapes as ``forward_extend``."""
        cache = self._write(k, v, layer, forward_batch, save_kv_cache)
        q_heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = routes.decode(
            cache, q_heads, self._page_table(layer), self.forward_metadata.seq_lens, **_params(layer, sinks)
        )
        return out.flatten(1).to(q.dtype)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        """Attention of a ragged batch of chunks.

        Args:
            q: ``[tokens, Hq * D]``; k, v: ``[tokens, Hkv, D]``, or None where a layer reads another's cache.
            sinks: ``[Hq]`` logits, or None.

        Returns:
            ``[tokens, Hq * Dv]`` in q's dtype.
        """
        cache = self._write(k, v, layer, forward_batch, save_kv_cache)
        meta, params = self.forward_metadata, _params(layer, sinks)
        parts = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(meta.q_lens)
        cached = [n for n, (seq, own) in enumerate(zip(meta.seq_lens, meta.q_lens)) if k is None or seq > own]
        fresh = sorted(set(range(len(parts))) - set(cached))
        out: dict[int, torch.Tensor] = {}
        if fresh:
            lens = [meta.q_lens[n] for n in fresh]
            chunks = (parts, k.split(meta.q_lens), v.split(meta.q_lens))
            own_qkv = (torch.cat([chunk[n] for n in fresh]) for chunk in chunks)
            result = routes.first_chunk(cache, *own_qkv, lens, **params)
            out.update(zip(fresh, result.split(lens)))
        if cached:
            lens = [meta.q_lens[n] for n in cached]
            queries = torch.cat([parts[n] for n in cached])
            seq_lens = [meta.seq_lens[n] for n in cached]
            result = routes.extend(cache, queries, self._page_table(layer)[cached], seq_lens, lens, **params)
            out.update(zip(cached, result.split(lens)))
        return torch.cat([out[n] for n in range(len(parts))]).flatten(1).to(q.dtype)

    def support_triton(self):
        return False

    def _write(self, k, v, layer, forward_batch, save_kv_cache) -> PagedCache:
        """Writes the batch's K and V, and returns the layer's packed pages."""
        if save_kv_cache and k is not None:
            loc = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=self.forward_metadata.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        return layer_cache(self.token_to_kv_pool, layer.layer_id)

    def _page_table(self, layer) -> torch.Tensor:
        meta = self.forward_metadata
        in_window_pool = is_sliding_window_layer(self.token_to_kv_pool, layer.layer_id)
        return meta.swa_page_table if in_window_pool else meta.page_table


def check_layer(layer: RadixAttention, pool) -> None:
    """Raises:
    UnsupportedConfig: for a layer whose attention the routes do not compute.
    """
    refused = {
        "cross-attention": layer.is_cross_attention,
        f"{layer.attn_type.value} attention": layer.attn_type is not AttentionType.DECODER,
        f"logit capping by {layer.logit_capping_method!r}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
        "attention temperature by length": layer.xai_temperature_len > 0,
        "attention in chunks": layer.use_irope,
        "a pool for a window that it does not name": (
            layer.sliding_window_size < 0 and is_sliding_window_layer(pool, layer.layer_id)
        ),
    }
    refuse_first(
        {f"layer {layer.layer_id} uses {feature}": present for feature, present in refused.items()},
        "causal decoder attention with GQA, sliding window, tanh soft-cap and sinks",
        "Serve this model with --kv-cache-dtype auto",
    )


def _params(layer: RadixAttention, sinks: torch.Tensor | None) -> dict:
    """A layer's settings as the routes take them."""
    return {
        "scale": layer.scaling,
        "window_left": layer.sliding_window_size,
        "softcap": layer.logit_cap,
        "sinks": sinks,
    }
