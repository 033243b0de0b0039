"""Checks and defaults while SGLang resolves its arguments: before weights load, in the launching process.

What a recipe cannot be served with is refused here by name; nothing is switched off silently. SGLang
calls these resolution hooks, an official extension point.
"""

from __future__ import annotations

import os

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import DEFAULT_PAGE_SIZE, RECIPES, check_head_dim, check_page_size, is_recipe
from sglang_quantkv.integration.planner import check_attention
from sglang_quantkv.settings import Settings

BACKEND_NAME = "quantkv"
# Models that accept only backends from a list of SGLang's get ours behind a name on their list.
BACKEND_ALIAS = "triton"
_INSISTING_ARCHITECTURES = ("GptOss", "Exaone")

SOURCE = "sglang_quantkv"
# What is declared under that name where the user left it open, and why; the start-up block shows it.
REASONS = {
    "page_size": "records are laid out by page",
    "attention_backend": "the one that reads packed pages",
    "cuda_graph_config": "--quantkv-reference reads lengths on the host, which a captured graph cannot",
}


def register_resolution() -> None:
    """Puts the three steps into SGLang's resolution pipeline."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    # The first step after the model's path, device and format are known that runs for every server.
    register_resolution_hook("handle_pd_disaggregation")(_resolve)
    # Before memory is budgeted: graphs would reserve some.
    register_resolution_hook("handle_cuda_graph_config")(_resolve_graphs)
    # The last step that may still change a backend.
    register_resolution_hook("handle_model_capability_adjustments")(_verify)


def _resolve(server_args, previous) -> None:
    """Refuses what cannot be served, and fills in what the user left open."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    previous(server_args)
    cfg = resolving_view(server_args)
    if is_recipe(cfg.speculative_draft_kv_cache_dtype):
        raise UnsupportedConfig(
            f"--speculative-draft-kv-cache-dtype {cfg.speculative_draft_kv_cache_dtype}",
            "a draft cache in bf16",
            "Leave the flag out",
        )
    if not is_recipe(cfg.kv_cache_dtype):
        if BACKEND_NAME in (cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend):
            raise UnsupportedConfig(
                f"--attention-backend {BACKEND_NAME} with --kv-cache-dtype {cfg.kv_cache_dtype}",
                f"that backend with --kv-cache-dtype {', '.join(RECIPES)}",
                "Choose a recipe or another backend",
            )
        return
    _refuse_flags(cfg)
    check_page_size(cfg.page_size or DEFAULT_PAGE_SIZE)
    architecture = _check_model(server_args, cfg)
    if cfg.page_size is None:
        declare_resolution(server_args, SOURCE, page_size=DEFAULT_PAGE_SIZE)
    if cfg.attention_backend is None:
        insists = architecture.startswith(_INSISTING_ARCHITECTURES)
        declare_resolution(server_args, SOURCE, attention_backend=BACKEND_ALIAS if insists else BACKEND_NAME)


def _resolve_graphs(server_args, previous) -> None:
    """Refuses graphs that our backend cannot be in, and all of them for the torch routes."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    previous(server_args)
    cfg = resolving_view(server_args)
    if not is_recipe(cfg.kv_cache_dtype) or cfg.device == "cpu":
        return
    graphs = cfg.cuda_graph_config
    if graphs.prefill.backend not in (Backend.BREAKABLE, Backend.DISABLED):
        raise UnsupportedConfig(
            f"prefill graphs of kind {graphs.prefill.backend!r} with --kv-cache-dtype {cfg.kv_cache_dtype}",
            f"{Backend.BREAKABLE!r}, in which attention runs outside, and {Backend.DISABLED!r}",
            "Leave the prefill part of --cuda-graph-config out",
        )
    if Settings.from_environment().reference:
        for phase in (Phase.DECODE, Phase.PREFILL):
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
        declare_resolution(server_args, SOURCE, cuda_graph_config=graphs)


def _verify(server_args, previous) -> None:
    """Late: what SGLang or the model changed since must still fit, the dtype first of all."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view, resolving_view

    previous(server_args)
    cfg = resolving_view(server_args)
    asked = server_args._raw_input["kv_cache_dtype"]
    if not is_recipe(asked):
        return
    if cfg.kv_cache_dtype != asked:
        raise UnsupportedConfig(
            f"--kv-cache-dtype {asked}: SGLang changed it to {cfg.kv_cache_dtype} for this model",
            f"--kv-cache-dtype {cfg.kv_cache_dtype}",
            "Ask for that dtype",
        )
    check_page_size(cfg.page_size)
    for backend in attention_backends_of(resolved_view(server_args)):
        _check_backend("attention backend", backend, asked)


def _refuse_flags(cfg) -> None:
    """Raises UnsupportedConfig for the first flag that a packed cache cannot be served with in this version."""
    dtype = f"--kv-cache-dtype {cfg.kv_cache_dtype}"
    refuse_cpu_engine(cfg.kv_cache_dtype)
    refused = {
        "--enable-unified-memory": cfg.enable_unified_memory,
        "--enable-page-major-kv-layout": cfg.enable_page_major_kv_layout,
        "--enable-kv-cache-sharding": cfg.enable_kv_cache_sharding,
        "--prefill-only-disable-kv-cache": cfg.prefill_only_disable_kv_cache,
        "--enable-hierarchical-cache": cfg.enable_hierarchical_cache,
        "--enable-unified-cache-external-linker": cfg.enable_unified_cache_external_linker,
        "--enable-lmcache": cfg.enable_lmcache,
        "--enable-flexkv": cfg.enable_flexkv,
        f"--radix-cache-backend {cfg.radix_cache_backend}": cfg.radix_cache_backend is not None,
        f"--kv-canary {cfg.kv_canary}": cfg.kv_canary != "none",
        f"--disaggregation-mode {cfg.disaggregation_mode}": cfg.disaggregation_mode != "null",
        f"--speculative-algorithm {cfg.speculative_algorithm}": cfg.speculative_algorithm is not None,
        f"--dllm-algorithm {cfg.dllm_algorithm}": cfg.dllm_algorithm is not None,
        f"--dcp-size {cfg.dcp_size}": cfg.dcp_size > 1,
        f"--attn-cp-size {cfg.attn_cp_size}": cfg.attn_cp_size > 1,
        "--enable-prefill-cp": cfg.enable_prefill_cp,
        f"--prefill-kv-cache-dequant-dtype {cfg.prefill_kv_cache_dequant_dtype}": (
            cfg.prefill_kv_cache_dequant_dtype != "auto"
        ),
        "--enable-hisparse": cfg.enable_hisparse,
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-pdmux": cfg.enable_pdmux,
        # A cold prompt and a radix hit differ by the precision of the first chunk.
        "--enable-deterministic-inference": cfg.enable_deterministic_inference,
        "--use-ray": cfg.use_ray,  # its actors load no plugins
    }
    for flag, given in refused.items():
        if given:
            raise UnsupportedConfig(
                f"{flag} with {dtype}", f"{dtype} without this flag", f"Leave {flag.split()[0]} out"
            )
    for variable, plain in (
        ("SGLANG_USE_HND_KVCACHE", "0"),
        ("SGLANG_AITER_KV_CACHE_LAYOUT", "nhd"),
        ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "0"),
    ):
        value = os.getenv(variable, plain)
        if value.lower() not in (plain, "false"):
            raise UnsupportedConfig(f"{variable}={value} with {dtype}", "the variable left unset", f"Unset {variable}")
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        _check_backend("--" + flag.replace("_", "-"), getattr(cfg, flag), cfg.kv_cache_dtype)


def refuse_cpu_engine(dtype: str) -> None:
    """Raises UnsupportedConfig where SGLang's own CPU engine is asked for; its kernels write unpacked pages."""
    if os.getenv("SGLANG_USE_CPU_ENGINE", "0") == "1":
        raise UnsupportedConfig(
            f"--kv-cache-dtype {dtype} with SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1)",
            "sglang_quantkv's CPU platform, which is used without that variable",
            "Unset SGLANG_USE_CPU_ENGINE",
        )


def _check_backend(source: str, backend: str | None, dtype: str) -> None:
    if backend not in (None, BACKEND_NAME, BACKEND_ALIAS):
        raise UnsupportedConfig(
            f"{source} {backend} cannot read --kv-cache-dtype {dtype}",
            f"{BACKEND_NAME} (or {BACKEND_ALIAS}, which stands for it with this dtype)",
            f"Use --attention-backend {BACKEND_NAME}, the default, or leave the flags for backends out",
        )


def _check_model(server_args, cfg) -> str:
    """Refuses models without a packed cache; returns the model's architecture."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = model_config_of(server_args)
    architecture = (model.hf_config.architectures or ["a model without a named architecture"])[0]
    check_attention(architecture, model)
    head_dims = sorted({model.head_dim, model.v_head_dim, model.swa_head_dim, model.swa_v_head_dim})
    for head_dim in head_dims:
        check_head_dim(head_dim)
    _check_kernels(cfg, architecture, head_dims)
    if cfg.device == "cpu" and mambaish_config(model) is not None:
        raise UnsupportedConfig(
            f"{architecture} on a CPU: SGLang's linear attention needs Triton",
            "models with attention in every layer on a CPU, this one on a GPU",
            "Serve this model on a GPU",
        )
    return architecture


def _check_kernels(cfg, architecture: str, head_dims: list[int]) -> None:
    """Refuses a device, head dim or dtype without kernels, before weights load."""
    from sglang_quantkv.integration.implementation import target_of
    from sglang_quantkv.kernels.build import HEAD_DIMS

    target = target_of(cfg.device, Settings.from_environment())
    if target is None:
        return
    if missing := [dim for dim in head_dims if dim not in HEAD_DIMS]:
        raise UnsupportedConfig(
            f"{architecture} has head_dim {missing[0]}, for which {target} has no kernels",
            f"head_dim {', '.join(map(str, HEAD_DIMS))}",
            "Serve it with --kv-cache-dtype auto, or slowly with --quantkv-reference",
        )
