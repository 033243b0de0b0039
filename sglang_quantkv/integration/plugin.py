"""The SGLang plugin: dtype names, the attention backend, the checks, and every hook with its card.

SGLang runs ``register`` in each of its processes and swallows what it raises. So names are offered only
when everything else is in place (a broken plugin makes argparse reject the dtype), and the hook that turns
our name into a dtype refuses unless all other hooks took effect.
"""

from __future__ import annotations

from importlib.metadata import version

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import DTYPE_NAMES, is_recipe
from sglang_quantkv.integration import metrics, planner, report
from sglang_quantkv.integration.hooks import Hook, missing_hooks, register_hooks
from sglang_quantkv.integration.resolution import BACKEND_ALIAS, BACKEND_NAME, register_resolution
from sglang_quantkv.integration.selection import STORE_DTYPE, recipe_of

SGLANG_VERSION = "0.5.23"


# Why the plugin is not in place in this process; None once it is.
_failure: Exception | None = RuntimeError("SGLang did not run it; leave SGLANG_PLUGINS and SGLANG_PLATFORM unset")


def register() -> None:
    """The entry point; see the module's docstring. Raises whatever goes wrong, for SGLang to log."""
    global _failure
    try:
        check_version()
        _register_backend()
        register_resolution()
        register_hooks(HOOKS)
        _offer_dtype_names()
    except Exception as error:
        _failure = error
        raise
    _failure = None


def check_version() -> None:
    """Raises:
    UnsupportedConfig: on another version of SGLang than the one this package is written for.
    """
    if (found := version("sglang")) != SGLANG_VERSION:
        raise UnsupportedConfig(
            f"SGLang {found} is installed", f"SGLang {SGLANG_VERSION}", f"pip install sglang=={SGLANG_VERSION}"
        )


def verify() -> None:
    """Raises:
    RuntimeError: unless the plugin registered and SGLang applied all of its hooks in this process.
    """
    if _failure is not None:
        raise RuntimeError(
            f"sglang_quantkv: the plugin did not register: {_failure}. Refusing to serve a cache that is not what "
            "was asked for; reinstall sglang_quantkv."
        ) from _failure
    if missing := missing_hooks(HOOKS):
        details = "; ".join(f"{hook.target} ({hook.why})" for hook in missing)
        raise RuntimeError(
            f"sglang_quantkv: {len(missing)} of {len(HOOKS)} hooks into SGLang did not take effect: {details}. "
            f"Supported: an unmodified SGLang {SGLANG_VERSION}. pip install --force-reinstall sglang=={SGLANG_VERSION}"
        )


def dtype_choices() -> list[str]:
    """The very list of ``--kv-cache-dtype`` values that argparse accepts; SGLang has no official way to extend it."""
    from sglang.srt.server_args import ServerArgs

    metadata = ServerArgs.__annotations__["kv_cache_dtype"].__metadata__
    return next(argument.choices for argument in metadata if getattr(argument, "choices", None) is not None)


def _offer_dtype_names() -> None:
    choices = dtype_choices()
    choices.extend(name for name in DTYPE_NAMES if name not in choices)


def _register_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    stock = ATTENTION_BACKENDS[BACKEND_ALIAS]

    def ours(runner):
        from sglang_quantkv.integration.backend import QuantKVAttnBackend

        return QuantKVAttnBackend(runner)

    add_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(ours)
    register_attention_backend(BACKEND_ALIAS)(lambda runner: ours(runner) if recipe_of(runner) else stock(runner))


def _configure_dtype(original, **kwargs):
    name = kwargs["server_args_kv_cache_dtype"]
    if not is_recipe(name):
        return original(**kwargs)
    verify()
    if kwargs["is_draft_worker"]:
        # An explicit name: with "auto" SGLang would stamp the target's on a draft that stores bf16.
        kwargs["server_args_kv_cache_dtype"] = "bfloat16"
        resolved, dtype = original(**kwargs)
        return resolved or "bfloat16", dtype
    return name, STORE_DTYPE


def _pool_class(original, self, *, kind, default):
    from sglang_quantkv.integration.pool import pool_class

    resolved = original(self, kind=kind, default=default)
    recipe = recipe_of(self)
    return pool_class(recipe) if recipe and kind == "mha" else resolved


def _check_pool(pool, self, *args, **kwargs):
    from sglang_quantkv.integration.pool import QuantKVPool, sub_pools

    if (recipe := recipe_of(self)) is None:
        return
    for name, part in sub_pools(pool):
        if not isinstance(part, QuantKVPool):
            raise UnsupportedConfig(
                f"--kv-cache-dtype {self.kv_cache_dtype_str}: SGLang built a {type(part).__name__} for the {name} "
                f"layers of {self.model_config.hf_config.architectures}",
                f"models whose layers all cache in {recipe.name} records",
                "Serve this model with --kv-cache-dtype auto",
            )


def _check_backend(backend, *, model_runner, backend_str, **kwargs):
    from sglang_quantkv.integration.backend import QuantKVAttnBackend

    if recipe_of(model_runner) and not isinstance(backend, QuantKVAttnBackend):
        raise UnsupportedConfig(
            f"attention backend {backend_str!r} would read packed pages as if they were numbers",
            f"--attention-backend {BACKEND_NAME}",
            "Leave --attention-backend out",
        )


def _no_fused_writer(original, forward_batch):
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    from sglang_quantkv.integration.pool import QuantKVPool, sub_pools

    if any(isinstance(part, QuantKVPool) for _, part in sub_pools(get_token_to_kv_pool())):
        return False
    return original(forward_batch)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype",
        "around",
        _configure_dtype,
        why="SGLang knows no dtype of this name; here the name becomes uint8, after checking every other hook",
        until="SGLang lets plugins register KV cache dtypes",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class",
        "around",
        _pool_class,
        why="the pool would be SGLang's plain one, for plain, sliding-window and hybrid models alike",
        until="a KV cache dtype can name its pool class on every platform",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
        "after",
        _check_pool,
        why="a model that builds its pool another way would get unpacked pages under our name",
        until="every pool is built through _resolve_kv_pool_class",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup"
        "._build_full_attention_backend_from_str",
        "after",
        _check_backend,
        why="a stock attention backend would read packed pages as numbers",
        until="backends declare the KV dtypes that they read",
    ),
    Hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        "around",
        _no_fused_writer,
        why="models that fuse RoPE with the KV write put bf16 rows into packed pages on ROCm",
        until="the gate looks at the pool's class on every platform",
    ),
    *planner.HOOKS,
    *report.HOOKS,
    *metrics.HOOKS,
)
