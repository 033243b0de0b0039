"""What people see: the start-up block, and the ``quantkv`` object of ``GET /server_info``.

Every figure is read from the live pool's tensors and the route counters, not from flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_quantkv.integration import metrics
from sglang_quantkv.integration.hooks import Hook
from sglang_quantkv.integration.resolution import REASONS, SOURCE
from sglang_quantkv.integration.selection import recipe_of

if TYPE_CHECKING:
    from sglang_quantkv.integration.backend import QuantKVAttnBackend
    from sglang_quantkv.kernels.routes import Routes


def live_report(runner) -> dict:
    """The ``quantkv`` object for a ModelRunner that serves from a packed cache; plain JSON types.

    Bytes and tokens are this rank's. A composite pool has one entry in ``pools`` per part.
    """
    from sglang_quantkv.integration.pool import sub_pools
    from sglang_quantkv.kernels.routes import PHASES

    backend = backend_of(runner)
    caching = [(name, pool) for name, pool in sub_pools(runner.token_to_kv_pool) if pool.layer_num]
    pools = [_pool_report(name, pool) for name, pool in caching]
    kernels = {
        phase: list(
            dict.fromkeys(
                str(desc)
                for _, pool in caching
                for desc in backend.routes.describe(phase, pool.paged_cache(pool.start_layer))
            )
        )
        for phase in PHASES
    }
    return {
        "recipe": recipe_of(runner).name,
        "page_size": runner.page_size,
        "device": str(runner.device),
        "max_total_num_tokens": int(runner.max_total_num_tokens),
        "pools": pools,
        "pool_bytes": pool_nbytes(runner),
        "workspace_bytes": backend.workspace_nbytes,
        "kernels": kernels,
        "store_does_norm_and_rope": _ranges(sorted(backend.norm_ropes)),
        "store_after_rope": _ranges(sorted(set(backend.layer_ids) - set(backend.norm_ropes))),
        "calls": {str(desc): count for desc, count in sorted(backend.routes.calls.items(), key=str)},
        "fallbacks": fallbacks(backend.routes, runner.device),
        "declared": _declared(runner.server_args),
    }


def backend_of(runner) -> QuantKVAttnBackend:
    """Our attention backend in a runner, alone or beside that of linear layers."""
    return getattr(runner.attn_backend, "full_attn_backend", runner.attn_backend)


def pool_nbytes(runner) -> int:
    """Of all packed pages of this rank."""
    from sglang_quantkv.integration.pool import sub_pools

    pools = [pool for _, pool in sub_pools(runner.token_to_kv_pool)]
    return sum(t.numel() * t.element_size() for pool in pools for t in (*pool.k_buffer, *pool.v_buffer))


def fallbacks(routes: Routes, device: str) -> dict[str, int]:
    """Calls that a GPU served without its kernels, by reason: only ever because that was asked for."""
    slow = sum(count for desc, count in routes.calls.items() if desc.implementation == "torch")
    return {metrics.REFERENCE: slow} if slow and not str(device).startswith("cpu") else {}


def _ranges(layers: list[int]) -> str:
    """Ascending layer ids as text: "0-3, 5"."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1][-1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _pool_report(name: str, pool) -> dict:
    tensors = [*pool.k_buffer, *pool.v_buffer]
    slots = pool.size + pool.page_size
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    unquantized = pool.layer_num * pool.head_num * (pool.head_dim + pool.v_head_dim)
    per_token = nbytes // slots
    return {
        "layers": name,
        "num_layers": pool.layer_num,
        "kv_heads": pool.head_num,
        "head_dim": pool.head_dim,
        "v_head_dim": pool.v_head_dim,
        "dtype": str(tensors[0].dtype).removeprefix("torch."),
        "bytes": nbytes,
        "tokens": pool.size,
        "bytes_per_token": per_token,
        "bytes_per_token_per_layer": per_token // pool.layer_num,
        "bf16": {
            "bytes_per_token": 2 * unquantized,
            "tokens_in_same_bytes": pool.size * per_token // (2 * unquantized),
        },
        "fp8": {"bytes_per_token": unquantized, "tokens_in_same_bytes": pool.size * per_token // unquantized},
    }


def _declared(server_args) -> dict[str, str]:
    """What this package decided where the user left it open, by argument, with the reason."""

    def text(value) -> str:
        phases = [f"{name} {getattr(value, name).backend}" for name in ("decode", "prefill") if hasattr(value, name)]
        return ", ".join(phases) or str(value)

    return {
        field: f"{text(value)} ({REASONS[field]})"
        for source, fields in getattr(server_args, "_resolved_overrides", None) or ()
        if source == SOURCE
        for field, value in fields.items()
    }


def startup_block(report: dict) -> str:
    """The report as the lines that start-up prints."""
    lines = [f"sglang_quantkv: {report['recipe']} KV cache, pages of {report['page_size']}, on {report['device']}"]
    for pool in report["pools"]:
        dims = f"D {pool['head_dim']}" + (f"/{pool['v_head_dim']}" if pool["v_head_dim"] != pool["head_dim"] else "")
        bf16, fp8 = pool["bf16"], pool["fp8"]
        lines += [
            (
                f"  {pool['layers']} layers: {pool['num_layers']} x {pool['kv_heads']} KV heads x {dims}, stored as "
                f"{pool['dtype']}, {pool['bytes'] / 2**20:,.1f} MiB"
            ),
            (
                f"    bytes per token {pool['bytes_per_token']:,} ({pool['bytes_per_token_per_layer']:,} per layer); "
                f"bf16 {bf16['bytes_per_token']:,} ({bf16['bytes_per_token'] / pool['bytes_per_token']:.2f}x); "
                f"fp8 {fp8['bytes_per_token']:,} ({fp8['bytes_per_token'] / pool['bytes_per_token']:.2f}x)"
            ),
            (
                f"    tokens {pool['tokens']:,}; in the same bytes: bf16 {bf16['tokens_in_same_bytes']:,}, "
                f"fp8 {fp8['tokens_in_same_bytes']:,}"
            ),
        ]
    lines += [f"  {phase}: {', '.join(names)}" for phase, names in report["kernels"].items()]
    for text, layers in (
        ("norm and rotary embedding inside the store", report["store_does_norm_and_rope"]),
        ("stored after their own rotary embedding", report["store_after_rope"]),
    ):
        lines += [f"  layers {layers}: {text}"] if layers else []
    lines += [f"  workspace {report['workspace_bytes'] / 2**20:,.1f} MiB"]
    lines += [f"  set by sglang_quantkv: {field} = {value}" for field, value in report["declared"].items()]
    return "\n".join(lines)


def _add_init_info(info: dict, scheduler):
    from sglang.srt.runtime_context import get_parallel

    runner = scheduler.tp_worker.model_runner
    if recipe_of(runner) is None:
        return
    backend_of(runner).routes.calls.clear()  # what warm-up and capture called
    metrics.publish(runner)
    info["quantkv"] = live_report(runner)
    if get_parallel().tp_rank == 0:
        print(startup_block(info["quantkv"]), flush=True)


def _add_internal_state(_, controller, state: dict):
    runner = controller.scheduler.tp_worker.model_runner
    if recipe_of(runner) is not None:
        state["quantkv"] = live_report(runner)


async def _refresh_server_info(original, manager):
    from sglang.srt.entrypoints import http_server

    states = await original(manager)
    if http_server._global_state is not None and "quantkv" in states[0]:
        http_server._global_state.scheduler_info["quantkv"] = states[0]["quantkv"]
    return states


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "after",
        _add_init_info,
        why="/server_info would not say what the cache is, and start-up would print nothing",
        until="SGLang has a seam for plugins in its server info",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_memory_usage",
        "after",
        _add_internal_state,
        why="/server_info would show the counters of start-up",
        until="SGLang has a seam for plugins in its internal state",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        "around",
        _refresh_server_info,
        why="the top-level quantkv object of /server_info would keep the counters of start-up",
        until="SGLang has a seam for plugins in its server info",
    ),
)
