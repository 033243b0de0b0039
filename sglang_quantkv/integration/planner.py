"""SGLang's view of a model's KV shape, and the hooks that make its memory planner price our recipes.

``kv_shape`` describes what SGLang's pool builders allocate, which is not always what its planner prices. The
``plan`` command and the hooks both use it, so a plan is what a server allocates.

SGLang gives a pool one page more than planned (the dummy, slot 0), whatever the recipe; like SGLang, nothing
here charges for it.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from sglang_quantkv.errors import UnsupportedConfig, refuse_first
from sglang_quantkv.integration.hooks import Hook
from sglang_quantkv.integration.selection import recipe_of
from sglang_quantkv.plan import KVShape, LayerGroup, Price


def load_shape(config: Path, *, tp_size: int = 1, is_draft: bool = False, trust_remote_code: bool = False) -> KVShape:
    """The shape of the model whose config file is given, read by SGLang without weights, GPU or network.

    Args:
        is_draft: read it as a draft: of a model with its own draft layers (MTP), those.

    Raises:
        UnsupportedConfig: when SGLang cannot read it, or the model has no cache of keys and values.
    """
    with _quiet():
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices

        class AnyWeights(ModelConfig):
            def _verify_quantization(self):
                """Nothing: weights are not loaded, so those of gpt-oss are no error on a machine without a GPU."""

        try:
            model_config = AnyWeights(
                str(config.parent),
                override_config_file=None if config.name == "config.json" else config.name,
                is_draft_model=is_draft,
                trust_remote_code=trust_remote_code,
            )
            # Without a model this is one pipeline stage that has all layers.
            layer_info = resolve_layer_indices(model=None, model_config=model_config, is_draft_worker=is_draft)
            return kv_shape(model_config, layer_info, tp_size)
        except UnsupportedConfig:
            raise
        except Exception as error:  # a config can break SGLang's and transformers' code in any way
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise UnsupportedConfig(
                f"SGLang cannot read {config}: {reason}",
                "models that this version of SGLang serves",
                "Check the file, or give --trust-remote-code if it brings its own code",
            ) from error


@contextmanager
def _quiet():
    """Keeps out what SGLang says about missing GPU libraries while it is imported."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def kv_shape(model_config, layer_info, tp_size: int, dcp_size: int = 1) -> KVShape:
    """What SGLang's pool builders allocate for one rank's layers, one pipeline stage.

    Args:
        model_config: SGLang's ModelConfig.
        layer_info: SGLang's ModelLayerInfo, which layers the stage has.
        tp_size, dcp_size: ranks over which attention is split.

    Raises:
        UnsupportedConfig: for models that cache something else than keys and values per head.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    architecture = model_config.hf_config.architectures[0]
    check_attention(architecture, model_config)
    dim, layers = model_config.head_dim, layer_info.num_effective_layers
    # Where SGLang's builders pass no v_head_dim on, values are as wide as keys, whatever its planner prices.
    group = LayerGroup(layers, model_config.get_num_kv_heads(tp_size, dcp_size), dim, dim)
    if model_config.is_hybrid_swa:
        groups = _split_groups(model_config, layer_info, tp_size, group)
    elif (hybrid := mambaish_config(model_config)) is not None:
        stage = range(layer_info.start_layer, layer_info.end_layer)
        # A draft of such a model is one layer of full attention.
        cached = 1 if model_config.is_draft_model else sum(i in stage for i in hybrid.full_attention_layer_ids)
        groups = (replace(group, layers=cached),)
    else:
        groups = (replace(group, v_head_dim=model_config.v_head_dim),)
    return KVShape(architecture, layers, model_config.context_len, groups)


def _split_groups(model_config, layer_info, tp_size: int, group: LayerGroup) -> tuple[LayerGroup, LayerGroup]:
    """The full and the windowed layers of a model with a sliding-window pool."""
    full = replace(group, layers=len(layer_info.full_attention_layer_ids))
    windowed = replace(
        group,
        layers=len(layer_info.swa_attention_layer_ids),
        window=model_config.sliding_window_size or model_config.attention_chunk_size,
    )
    if not model_config.is_hybrid_swa_compress:
        # SGLang's planner looks up a windowed layer's own heads here too; its pool is built without them.
        return full, windowed
    return replace(full, v_head_dim=model_config.v_head_dim), replace(
        windowed,
        kv_heads=model_config.get_swa_num_kv_heads(tp_size),
        head_dim=model_config.swa_head_dim,
        v_head_dim=model_config.swa_v_head_dim,
    )


def check_attention(architecture: str, model_config) -> None:
    """Raises:
    UnsupportedConfig: unless the model caches one key and one value per KV head and token, and attends
        causally to all of them or to a sliding window.
    """
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_v4, is_minimax_sparse
    from sglang.srt.layers.attention.qsa.config import parse_qsa_profile

    own_kind = {
        f"{model_config.attention_arch.name} attention": model_config.attention_arch is not AttentionArch.MHA,
        "compressed attention": is_deepseek_v4(model_config.hf_config),
        "a sparse attention index": is_minimax_sparse(model_config.hf_config)
        or parse_qsa_profile(model_config.hf_config) is not None,
        "cross-attention": model_config.is_encoder_decoder,
        "attention in chunks": model_config.is_local_attention_model,
        "bidirectional attention": model_config.is_embedding_gemma,
    }
    refuse_first(
        {f"{architecture} has {what}, which no packed cache serves": found for what, found in own_kind.items()},
        "causal decoder-only models with multi-head or grouped-query attention",
        "Serve this model with --kv-cache-dtype auto or fp8_e4m3",
    )


# ---- hooks: SGLang's planner calls these while it turns memory into tokens ------------------------------


def _target_shape(kvc) -> KVShape:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return kv_shape(kvc.model_config, kvc.layer_info, parallel.attn_tp_size, parallel.attn_dcp_size)


def _draft_price(kvc) -> Price | None:
    """What a token costs in the draft model's own pool; None when the target has no such draft."""
    from sglang.srt.mem_cache import kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.runtime_context import get_model, get_spec

    draft = kvc.spec_aux_config.draft_model_config
    drafts = kvc.spec_algorithm.is_eagle() or kvc.spec_algorithm.is_standalone()
    if kvc.is_draft_worker or not drafts or draft is None:
        return None
    layer_info = resolve_layer_indices(model=None, model_config=draft, is_draft_worker=True)
    # As the draft's runner will resolve it; through the module, where that function is hooked.
    _, dtype = kv_cache_dtype.configure_kv_cache_dtype(
        server_args_kv_cache_dtype=get_model().kv_cache_dtype,
        model=None,
        model_dtype=draft.dtype,
        is_draft_worker=True,
        is_dflash=False,
        speculative_draft_attention_backend=get_spec().speculative_draft_attention_backend,
        speculative_draft_kv_cache_dtype=get_spec().speculative_draft_kv_cache_dtype,
    )
    return kv_shape(draft, layer_info, kvc.draft_attn_tp_size).price(dtype.itemsize, kvc.pool_page_size)


def _price_cell(original, self, kvc, num_layers: int) -> int:
    recipe = recipe_of(kvc)
    if recipe is None:
        return original(self, kvc, num_layers)
    (group,) = _target_shape(kvc).groups
    return num_layers * group.layer_nbytes(recipe, kvc.pool_page_size)


def _price_draft(result, self, kvc) -> None:
    recipe = recipe_of(kvc)
    draft = None if recipe is None else _draft_price(kvc)
    if draft is not None:
        self._cell_size = (_target_shape(kvc).price(recipe, kvc.pool_page_size) + draft).nbytes


def _price_split(result, self, kvc) -> None:
    recipe = recipe_of(kvc)
    if recipe is None:
        return
    full, windowed = _target_shape(kvc).groups
    self._full_per_token = full.layer_nbytes(recipe, kvc.pool_page_size)
    self._swa_per_token = windowed.layer_nbytes(recipe, kvc.pool_page_size)
    draft = _draft_price(kvc)
    if draft is not None:
        self._draft_full_layers_num = self._draft_swa_full_layers_num = 0
        self._draft_cell_size = draft.full
        # SGLang counts these in layers of the target; a fraction of one keeps its arithmetic exact.
        self._draft_swa_layers_num = Fraction(draft.sliding, self._swa_per_token)
    self._recompute_cell_size()


_CONFIGURATORS = "sglang.srt.model_executor.pool_configurator"
_UNTIL = "SGLang asks the pool class, or a registered KV format, for the bytes of a token"

HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_CONFIGURATORS}.DefaultPoolConfigurator._compute_cell_size",
        "around",
        _price_cell,
        why="SGLang prices head_dim elements of the storage dtype: int8 without its scales, mxfp4 at twice its size",
        until=_UNTIL,
    ),
    Hook(
        f"{_CONFIGURATORS}.DefaultPoolConfigurator.__init__",
        "after",
        _price_draft,
        why="SGLang prices a draft's layers like the target's, but a draft beside a recipe keeps a bf16 cache, 2 to "
        "4 times as large: memory would run out at start-up",
        until="SGLang prices EAGLE and standalone drafts from their own config and dtype, as it does for DFLASH",
    ),
    Hook(
        f"{_CONFIGURATORS}.HybridSWAPoolConfigurator.__init__",
        "after",
        _price_split,
        why="models with a sliding-window pool are priced here instead, with the same two mistakes",
        until=_UNTIL,
    ),
)
