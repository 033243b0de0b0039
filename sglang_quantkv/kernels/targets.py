"""What kernels are built for: NVIDIA, AMD and Hygon architectures, and the host emulation of each matrix unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sglang_quantkv.errors import UnsupportedConfig


class Platform(str, Enum):
    """Who compiles a target: nvcc, hipcc (or a clang that knows the architecture), or the host's C++ compiler."""

    CUDA = "cuda"
    HIP = "hip"
    EMULATED = "emulated"


# Register maps of matrix units, by name of the target; see hip/include/quantkv/arch.h.
EMULATED_MAPS = {
    "emulated_mma": "QUANTKV_MAP_MMA",
    "emulated_mfma": "QUANTKV_MAP_MFMA",
    "emulated_mfma_wide": "QUANTKV_MAP_MFMA_WIDE",
    "emulated_mmac": "QUANTKV_MAP_MMAC",
}
# A host pass does not know the architecture, but it counts threads and bytes for the kernels that are compiled for it.
HIP_MAPS = {
    "gfx942": "QUANTKV_MAP_MFMA",
    "gfx950": "QUANTKV_MAP_MFMA_WIDE",
    "gfx90a": "QUANTKV_MAP_MFMA",
    "gfx936": "QUANTKV_MAP_MMAC",
}
MIN_CUDA_CAPABILITY = 80
# Kernels written for Hopper use instructions that only the architecture's own feature set has.
_CUDA_ARCHITECTURES = {"sm_90": "sm_90a"}


@dataclass(frozen=True)
class Target:
    """One architecture, by the name that ``--target`` takes; see ``find_target``."""

    name: str

    @property
    def platform(self) -> Platform:
        if self.name in EMULATED_MAPS:
            return Platform.EMULATED
        return Platform.CUDA if self.name.startswith("sm_") else Platform.HIP

    @property
    def architecture(self) -> str:
        """As the compiler calls it."""
        return _CUDA_ARCHITECTURES.get(self.name, self.name)

    def __str__(self) -> str:
        return self.name


def find_target(name: str) -> Target:
    """The target that a name stands for.

    Raises:
        UnsupportedConfig: when there are no kernels for it.
    """
    capability = re.fullmatch(r"sm_(\d{2,3})", name)
    if name in EMULATED_MAPS or name in HIP_MAPS or (capability and int(capability[1]) >= MIN_CUDA_CAPABILITY):
        return Target(name)
    supported = f"sm_{MIN_CUDA_CAPABILITY} and later sm_XX, {', '.join((*HIP_MAPS, *EMULATED_MAPS))}"
    raise UnsupportedConfig(f"there are no kernels for target {name}", supported, "Choose one of these")


def current_target() -> Target:
    """The target of this machine: its first GPU's architecture, or the emulation of ``mma.sync`` where there is none.

    Raises:
        UnsupportedConfig: when there are no kernels for the GPU.
    """
    import torch

    if not torch.cuda.is_available():
        return Target("emulated_mma")
    if torch.version.hip:
        return find_target(torch.cuda.get_device_properties().gcnArchName.split(":")[0])
    return find_target("sm_{}{}".format(*torch.cuda.get_device_capability()))
