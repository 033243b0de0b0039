"""Which routes a process serves with: this machine's kernels, or plain torch where there is no GPU or it is asked for."""

from __future__ import annotations

import functools

import torch

from sglang_quantkv.integration.dense import find_dense
from sglang_quantkv.kernels.hip_routes import HipRoutes
from sglang_quantkv.kernels.routes import Routes
from sglang_quantkv.kernels.targets import Platform, Target, current_target, find_target
from sglang_quantkv.kernels.torch_routes import TorchRoutes
from sglang_quantkv.settings import Settings


def target_of(device_type: str, settings: Settings) -> Target | None:
    """Whose kernels serve on a device; None for the torch routes.

    Raises:
        UnsupportedConfig: for a GPU, or a target asked for, without kernels.
    """
    if settings.reference:
        return None
    if settings.target:
        return find_target(settings.target)
    return None if device_type == "cpu" else current_target()


def routes_of(device: torch.device | str) -> Routes:
    """This process's routes for a device, the same at every call."""
    return _routes(torch.device(device).type)


@functools.cache
def _routes(device_type: str) -> Routes:
    settings = Settings.from_environment()
    target = target_of(device_type, settings)
    if target is None:
        return TorchRoutes()
    if target.platform == Platform.EMULATED:
        return HipRoutes(target, None, 0)
    dense = find_dense(target)
    extend_from = dense.extend_from if settings.extend_from is None else settings.extend_from
    return HipRoutes(target, dense, extend_from)
