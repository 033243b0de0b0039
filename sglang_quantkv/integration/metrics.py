"""Prometheus metrics beside SGLang's, with its labels, for servers with ``--enable-metrics``.

=============================  ========  =================  =================================================
name                           kind      labels             meaning
=============================  ========  =================  =================================================
``quantkv_route_calls_total``  counter   phase, kernel      calls of a kernel, one per layer and forward pass
``quantkv_fallback_total``     counter   reason             calls that a GPU served without its kernels
``quantkv_pool_bytes``         gauge                        of this rank's packed pages
``quantkv_workspace_bytes``    gauge                        of device memory beside them
=============================  ========  =================  =================================================
"""

from __future__ import annotations

from collections import Counter

from sglang_quantkv.integration.hooks import Hook

REFERENCE = "--quantkv-reference"

# The runner that this process serves with, once it is ready, and what was already told of it.
_runner = None
_told: Counter = Counter()
_families: dict = {}


def publish(runner) -> None:
    """From now on, this runner's counters are among the metrics."""
    global _runner
    _runner = runner


def _update(_, collector, stats) -> None:
    if _runner is None:
        return
    from sglang_quantkv.integration.report import backend_of, fallbacks, pool_nbytes

    backend = backend_of(_runner)
    if not _families:
        _families.update(_make_families(tuple(collector.labels)))
    for desc, count in list(backend.routes.calls.items()):
        _add("quantkv_route_calls_total", collector, count, phase=desc.phase, kernel=str(desc))
    slow = fallbacks(backend.routes, _runner.device)
    _add("quantkv_fallback_total", collector, slow.get(REFERENCE, 0), reason=REFERENCE)
    for name, value in (("pool", pool_nbytes(_runner)), ("workspace", backend.workspace_nbytes)):
        _families[f"quantkv_{name}_bytes"].labels(**collector.labels).set(value)


def _add(name: str, collector, total: int, **labels: str) -> None:
    key = (name, *labels.values())
    _families[name].labels(**collector.labels, **labels).inc(total - _told[key])
    _told[key] = total


def _make_families(labels: tuple[str, ...]) -> dict:
    # Only now: SGLang sets the directory of the metrics of several processes first.
    from prometheus_client import Counter, Gauge

    mode = {"multiprocess_mode": "mostrecent"}
    return {
        "quantkv_route_calls_total": Counter(
            "quantkv_route_calls", "Calls of a kernel, one per layer and pass.", (*labels, "phase", "kernel")
        ),
        "quantkv_fallback_total": Counter(
            "quantkv_fallback", "Calls that a GPU served without its kernels.", (*labels, "reason")
        ),
        "quantkv_pool_bytes": Gauge("quantkv_pool_bytes", "Bytes of the packed pages.", labels, **mode),
        "quantkv_workspace_bytes": Gauge("quantkv_workspace_bytes", "Device memory beside them.", labels, **mode),
    }


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        "after",
        _update,
        why="Prometheus would not say which kernels ran",
        until="SGLang lets plugins add metrics of the scheduler",
    ),
)
