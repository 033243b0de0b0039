"""SGLang's attention backend over packed pages: writes the batch's K and V, then sends each request its way.

A request without a cached prefix attends to its own unquantized K and V; every other one reads packed
pages, the current chunk included, whatever brought the prefix (an earlier chunk, a radix hit).
"""

from __future__ import annotations

from collections import Counter

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_quantkv.errors import refuse_first
from sglang_quantkv.integration.call_point import take_over
from sglang_quantkv.integration.implementation import routes_of
from sglang_quantkv.integration.metadata import DecodeMetadata, ExtendMetadata, LayerKind, MetadataBuilder, Part, Tables
from sglang_quantkv.integration.pool import is_sliding_window_layer, layer_cache
from sglang_quantkv.integration.selection import recipe_of
from sglang_quantkv.reference import PagedCache


class QuantKVAttnBackend(AttentionBackend):
    """Attention for models whose pool is ``QuantKVPool``, plain or inside SGLang's composite pools.

    Attributes:
        routes: what computes.
        norm_ropes: by layer id, of the layers whose norm and rotary embedding the store does.
        layer_ids: of all layers.

    Raises:
        UnsupportedConfig: when a layer of the model computes attention that the routes do not.
        UnsupportedConfig, RuntimeError: when a kernel cannot be had.
    """

    # A decode step reads lengths on the device alone.
    needs_cpu_seq_lens = False

    def __init__(self, model_runner):
        super().__init__()
        assert recipe_of(model_runner) is not None, "built only for a runner whose cache is ours"
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.max_context_len = model_runner.model_config.context_len
        self.forward_metadata: DecodeMetadata | ExtendMetadata | None = None

        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        for layer in layers:
            check_layer(layer, self.token_to_kv_pool)
        self.layer_ids = sorted(layer.layer_id for layer in layers)
        self._kinds = {layer.layer_id: self._kind(layer) for layer in layers}
        samples = {kind: layer_cache(self.token_to_kv_pool, layer) for layer, kind in self._kinds.items()}
        self.routes = routes_of(model_runner.device)
        self.routes.prepare(samples.values(), model_runner.dtype, _max_chunk_tokens(model_runner))
        takes_over = self.routes.stores_with_norm_rope
        self.norm_ropes = take_over(model_runner.model, model_runner.dtype) if takes_over else {}
        self._builder = MetadataBuilder(model_runner, self.routes, samples)

        # Of captured decode steps, which take their metadata from the first rows of the same tables.
        self._graph_tables: Tables | None = None
        self._captured: dict[int, DecodeMetadata] = {}

    @property
    def workspace_nbytes(self) -> int:
        """Device memory beside the pool that is held for good."""
        return self.routes.workspace_nbytes + (self._graph_tables.nbytes if self._graph_tables else 0)

    # ---- metadata --------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch):
        self.routes.tally = self.routes.calls
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
        elif forward_batch.forward_mode.is_decode():
            self.forward_metadata = self._builder.decode(forward_batch)
        else:
            self.forward_metadata = self._builder.extend(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int):
        self._graph_tables = self._builder.allocate(max_bs)
        # Sizes the scratch memory for the largest batch: it must not move once a graph has its address.
        self._graph_tables.seq_lens.zero_()
        self._builder.plan(self._graph_tables.seq_lens)

    def get_cuda_graph_seq_len_fill_value(self):
        # Rows that pad a batch have no tokens: they read nothing and get zeros.
        return 0

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False):
        """Of a decode step in a graph: which metadata it uses. The step itself fills it in."""
        requests = forward_batch.batch_size
        if in_capture:
            self._captured[requests] = DecodeMetadata(self._graph_tables.first(requests), {})
        else:
            self.routes.calls.update(self._captured[requests].calls)
        self.forward_metadata = self._captured[requests]

    def init_forward_metadata_in_graph(self, forward_batch):
        metadata = self.forward_metadata
        self.routes.tally = metadata.calls = Counter()
        self._builder.fill(metadata.tables, forward_batch.req_pool_indices, forward_batch.seq_lens)
        metadata.plans = self._builder.plan(metadata.tables.seq_lens)
        metadata.window_loc = self._builder.window_loc(forward_batch.out_cache_loc)

    # ---- attention -------------------------------------------------------------------------------------

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        """One query per request; shapes as ``forward_extend``."""
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        cache = self._write(q, k, v, layer, forward_batch, save_kv_cache, keeps_k=False)
        metadata, kind = self.forward_metadata, self._kinds[layer.layer_id]
        out = self.routes.decode(
            cache, q, metadata.tables.pages_of(kind), metadata.tables.seq_lens, metadata.plans[kind],
            **_params(layer, sinks),
        )  # fmt: skip
        return out.flatten(1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        """Attention of a ragged batch of chunks.

        Args:
            q: ``[tokens, Hq * D]``; k, v: ``[tokens, Hkv, D]``, or None where a layer reads another's cache.
            sinks: ``[Hq]`` logits, or None.

        Returns:
            ``[tokens, Hq * Dv]`` in q's dtype.
        """
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        parts = self.forward_metadata.parts_without_kv if k is None else self.forward_metadata.parts
        keeps_k = any(part.route == "first_chunk" for part in parts)
        cache = self._write(q, k, v, layer, forward_batch, save_kv_cache, keeps_k)
        out = None
        for part in parts:
            own = (t if part.rows is None or t is None else t[part.rows] for t in (q, k, v))
            result = self._attend(part, cache, *own, layer, sinks)
            if part.rows is None:
                return result.flatten(1)
            out = result.new_empty(len(q), *result.shape[1:]) if out is None else out
            out[part.rows] = result
        return out.flatten(1)

    def support_triton(self):
        return False

    def _attend(self, part: Part, cache: PagedCache, q, k, v, layer, sinks) -> torch.Tensor:
        kind, params = self._kinds[layer.layer_id], _params(layer, sinks)
        if part.route == "first_chunk":
            return self.routes.first_chunk(cache, q, k, v, part.chunks, **params)
        pages = part.tables.pages_of(kind)
        if part.route == "extend":
            return self.routes.extend(cache, q, pages, part.chunks, **params)
        is_decode, seq_lens = part.route == "decode", part.tables.seq_lens
        if kind not in part.plans:
            part.plans[kind] = (
                self.routes.plan_decode(cache, seq_lens, kind.group, kind.window_left)
                if is_decode
                else self.routes.plan_dequantized(part.chunks, kind.window_left)
            )
        if is_decode:
            return self.routes.decode(cache, q, pages, seq_lens, part.plans[kind], **params)
        return self.routes.dequantized(cache, q, pages, part.plans[kind], **params)

    def _write(self, q, k, v, layer, forward_batch, save_kv_cache, keeps_k: bool) -> PagedCache:
        """Writes the batch's K and V, and returns the layer's packed pages. Where the store also does the layer's norm
        and rotary embedding, Q is changed in place, and K too if it ``keeps_k``."""
        cache = layer_cache(self.token_to_kv_pool, layer.layer_id)
        if k is None or not save_kv_cache:
            return cache
        in_window_pool = self._kinds[layer.layer_id].in_window_pool
        slots = self.forward_metadata.window_loc if in_window_pool else forward_batch.out_cache_loc
        slots = slots[: len(k)].long()  # the rows of a padded batch come first
        if (norm_rope := self.norm_ropes.get(layer.layer_id)) is None:
            self.routes.store(cache, slots, k, v)
        else:
            positions = forward_batch.positions[: len(k)]
            self.routes.prepare_and_store(cache, slots, q, k, v, positions, norm_rope(), keeps_k)
        return cache

    def _kind(self, layer: RadixAttention) -> LayerKind:
        return LayerKind(
            is_sliding_window_layer(self.token_to_kv_pool, layer.layer_id),
            layer.sliding_window_size,
            layer.tp_q_head_num // layer.tp_k_head_num,
        )


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


def _max_chunk_tokens(model_runner) -> int:
    """New tokens of the largest batch of chunks."""
    server_args = model_runner.server_args
    chunk = server_args.chunked_prefill_size
    return chunk if chunk and chunk > 0 else server_args.max_prefill_tokens
