"""What the kernels' Python faces share: checks of arguments, and which compiled function to call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels import build
from sglang_quantkv.kernels.targets import Platform, Target, current_target, find_target
from sglang_quantkv.reference import PagedCache

if TYPE_CHECKING:
    import tvm_ffi

ALIGNMENT = 16  # bytes; what kernels load and store at a time


def find_device_target(device: torch.device, target: Target | None) -> Target:
    """The target whose kernels run on a device; this machine's if none is named.

    Raises:
        UnsupportedConfig: when the device cannot run the target.
    """
    target = target or current_target()
    if (target.platform == Platform.EMULATED) != (device.type == "cpu"):
        raise UnsupportedConfig(
            f"tensors on {device} with kernels for {target}",
            "a GPU with its own target, the CPU with an emulated one",
            "Leave target out on a GPU; on the CPU name an emulated target, or use the torch routes",
        )
    return target


@cache
def find_function(name: str, phase: str, recipe: str, head_dim: int, page_size: int, target: str) -> tvm_ffi.Function:
    """A function of a unit's module, which is built if this is the first time; see ``build.load``."""
    return getattr(build.load(build.Unit(phase, recipe, head_dim, page_size), find_target(target)), name)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *,
    packed: bool = True,
) -> None:
    """Checks one argument.

    Args:
        shape: None for any size.
        packed: whether it must be contiguous and start at a multiple of 16 bytes; else only its last axis must be
            contiguous.

    Raises:
        UnsupportedConfig: that says what was given, what is possible, what to do.
    """
    if (
        tensor.device != device
        or tensor.dtype not in dtypes
        or len(shape) != tensor.dim()
        or any(want is not None and want != size for want, size in zip(shape, tensor.shape))
    ):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnsupportedConfig(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}",
            f"{wanted} [{', '.join('any' if size is None else str(size) for size in shape)}] on {device}",
            "Convert it, or look whether another argument is the wrong one",
        )
    if not tensor.numel():
        return
    if packed and not (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0):
        raise UnsupportedConfig(
            f"{name} has strides {tensor.stride()} and starts {tensor.data_ptr() % ALIGNMENT} bytes past {ALIGNMENT}",
            f"contiguous tensors that start at a multiple of {ALIGNMENT} bytes",
            "Copy it once with .clone(memory_format=torch.contiguous_format)",
        )
    if tensor.stride(-1) != 1:
        raise UnsupportedConfig(
            f"{name} has strides {tensor.stride()}", "any, with 1 as the last", "Call .contiguous() on it"
        )


def check_cache(cache: PagedCache) -> tuple[int, torch.device]:
    """Checks that both records are what their blocks say.

    Returns:
        The number of KV heads, and the device.

    Raises:
        UnsupportedConfig: as ``check_tensor``.
    """
    heads, device = cache.k_records.shape[1], cache.k_records.device
    for name, records, block in (
        ("k_records", cache.k_records, cache.k_block),
        ("v_records", cache.v_records, cache.v_block),
    ):
        check_tensor(name, records, (len(cache.k_records), heads, block.nbytes), (torch.uint8,), device)
    return heads, device
