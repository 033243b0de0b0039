"""Builds kernels from ``hip/`` at first use or ahead of time, and loads them.

A module is one shared library per unit and target. It lies in a cache folder whose name is a hash of everything
that it is made of, so that a changed source, flag or compiler never meets an old module:

    CACHE/decode_int8_d128_p64-sm_90-<hash of sources, flags, tvm-ffi>/<hash of the compiler>.so

A machine without a compiler loads what an earlier build left there, whichever compiler made it.

The compilers are called directly, not through ``tvm_ffi.cpp``: that one takes architectures from the environment
of the process, needs ninja on PATH, and imports torch.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES
from sglang_quantkv.kernels.device_code import DeviceCode, amd_kernels, cuda_kernels
from sglang_quantkv.kernels.targets import EMULATED_MAPS, HIP_MAPS, Platform, Target
from sglang_quantkv.kernels.toolchain import DEVICE_ONLY_FLAGS, find_device_compiler, find_module_compiler

if TYPE_CHECKING:
    import tvm_ffi

PHASES = ("store", "decode", "extend", "dequantize", "slots")
HEAD_DIMS = (64, 128, 256)

_PACKAGE = Path(__file__).parents[1]
# A wheel carries hip/ inside the package. In the repository it lies beside it, and a link, which copies of a tree may
# lack, is inside.
_ROOTS = (_PACKAGE / "hip", _PACKAGE.parent / "hip")
HIP_ROOT = next((root.resolve() for root in _ROOTS if root.exists()), _ROOTS[0])

_FORMATS = {"int8": "kInt8", "mxfp4": "kMxfp4", "fp4_g32": "kFp4G32"}

# Contraction is off everywhere: kernels write fmaf where they mean it, and codes are the same on every target.
_FLAGS = {
    Platform.CUDA: (
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-lineinfo",
        "--expt-relaxed-constexpr",  # as clang: kernels may call constexpr functions
        "-Xptxas=-v",
        "-Xcompiler=-fPIC,-ffp-contract=off",
    ),
    Platform.HIP: ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-x", "hip"),
    Platform.EMULATED: (
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-fPIC",
        "-fno-gnu-unique",
        "-Wall",
        "-Wno-unknown-pragmas",
    ),
}
_SUFFIXES = {Platform.CUDA: ".cu", Platform.HIP: ".hip", Platform.EMULATED: ".cpp"}


@dataclass(frozen=True)
class Unit:
    """What is compiled at a time: one phase for one kind of cache. Its text names files and log lines.

    Raises:
        UnsupportedConfig: for a phase or recipe that does not exist.
    """

    phase: str
    recipe: str
    head_dim: int
    page_size: int

    def __post_init__(self):
        for what, name, names in (("phase", self.phase, PHASES), ("recipe", self.recipe, RECIPES)):
            if name not in names:
                raise UnsupportedConfig(f"there is no {what} {name}", ", ".join(names), "Choose one of these")

    def __str__(self) -> str:
        return f"{self.phase}_{self.recipe}_d{self.head_dim}_p{self.page_size}"

    @property
    def module_source(self) -> str:
        """Source text of a module that tvm-ffi loads."""
        return f'#include "src/{self.phase}_binding.h"\nQUANTKV_BIND_{self.phase.upper()}({self._config})\n'

    @property
    def device_source(self) -> str:
        """Source text of the kernels alone, which needs no header of tvm-ffi, CUDA's host side or ROCm."""
        return (
            f'#define QUANTKV_DEVICE_ONLY 1\n#include "src/{self.phase}.h"\n'
            f"QUANTKV_INSTANTIATE_{self.phase.upper()}({self._config})\n"
        )

    @property
    def _config(self) -> str:
        recipe = RECIPES[self.recipe]
        k, v = (f"quantkv::Format::{_FORMATS[format.name]}" for format in (recipe.k, recipe.v))
        return f"quantkv::CacheConfig<{k}, {v}, {self.head_dim}, {self.page_size}>"


def cache_root() -> Path:
    """Where modules are kept: ``SGLANG_QUANTKV_CACHE``, or a folder in the user's cache."""
    if chosen := os.environ.get("SGLANG_QUANTKV_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_quantkv"


@functools.cache
def load(unit: Unit, target: Target, root: Path = HIP_ROOT) -> tvm_ffi.Module:
    """The unit's module, built if this is the first time; once per process.

    Raises:
        UnsupportedConfig: when it has to be built and this machine has no compiler for it.
        CompileFailed: when the compiler refuses the sources.
    """
    import tvm_ffi

    return tvm_ffi.load_module(str(build_module(unit, target, root)))


def build_module(unit: Unit, target: Target, root: Path = HIP_ROOT) -> Path:
    """The unit's shared library, built if it is not in the cache; what the compiler said lies beside it as ``.log``.

    Processes that want the same module at once build it once. Raises as ``load`` does.
    """
    folder = module_folder(unit, target, root)
    try:
        compiler = find_module_compiler(target)
    except UnsupportedConfig:
        built = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime)
        if built:
            return built[-1]
        raise
    module = folder / f"{_hash(compiler.text.encode())}.so"
    if module.exists():
        return module
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"), tempfile.TemporaryDirectory(dir=folder) as work:
        if module.exists():  # built while this process waited
            return module
        source = Path(work, "unit").with_suffix(_SUFFIXES[target.platform])
        source.write_text(unit.module_source)
        output = Path(work, "unit.so")
        log = compiler.run(*module_arguments(target, root), source, "-shared", "-o", output, *_tvm_ffi_library())
        module.with_suffix(".log").write_text(log)
        output.rename(module)  # at once: whoever sees the file sees all of it
    return module


def module_folder(unit: Unit, target: Target, root: Path = HIP_ROOT) -> Path:
    """The cache folder of a unit's modules: its name changes with everything but the compiler."""
    parts = [unit.module_source, target.architecture, *_flags(target), importlib.metadata.version("apache-tvm-ffi")]
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        parts += [path.relative_to(root).as_posix(), path.read_bytes()]
    encoded = (part if isinstance(part, bytes) else part.encode() for part in parts)
    return cache_root() / f"{unit}-{target}-{_hash(*encoded)}"


def compile_device(unit: Unit, target: Target, root: Path = HIP_ROOT) -> DeviceCode:
    """The unit's kernels, compiled to be looked at. Nothing is kept, and no GPU or ROCm is needed.

    Raises:
        UnsupportedConfig: when this machine has no compiler for the target.
        CompileFailed: when the compiler refuses the sources.
    """
    compiler = find_device_compiler(target)
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "unit").with_suffix(_SUFFIXES[target.platform])
        source.write_text(unit.device_source)
        output = Path(work, "unit.out")
        arguments = [*_flags(target), *_includes(root), source, "-o", output]
        if target.platform == Platform.CUDA:
            return DeviceCode(compiler, cuda_kernels(compiler.run("-cubin", *arguments), output))
        compiler.run(*DEVICE_ONLY_FLAGS, *arguments)
        return DeviceCode(compiler, amd_kernels(output.read_text()))


def module_arguments(target: Target, root: Path = HIP_ROOT) -> tuple[str, ...]:
    """The compiler's flags and include folders for a module's source."""
    return (*_flags(target), *_includes(root), f"-I{_tvm_ffi() / 'include'}")


def _flags(target: Target) -> tuple[str, ...]:
    """Flags that decide what is built; none names a path of this machine."""
    match target.platform:
        case Platform.CUDA:
            return _FLAGS[Platform.CUDA]
        case Platform.HIP:
            return (*_FLAGS[Platform.HIP], f"-DQUANTKV_MAP={HIP_MAPS[target.name]}")
        case Platform.EMULATED:
            return (*_FLAGS[Platform.EMULATED], f"-DQUANTKV_EMULATED_MAP={EMULATED_MAPS[target.name]}")


def _includes(root: Path) -> tuple[str, ...]:
    return (f"-I{root}", f"-I{root / 'include'}")


def _tvm_ffi() -> Path:
    """Where tvm-ffi lies; importing it would import torch."""
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None:
        raise UnsupportedConfig(
            "kernels need tvm-ffi", "apache-tvm-ffi as SGLang requires it", "Install apache-tvm-ffi"
        )
    return Path(spec.origin).parent


def _tvm_ffi_library() -> tuple[str, ...]:
    return (f"-L{_tvm_ffi() / 'lib'}", "-ltvm_ffi")


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path):
    """Holds a file's lock, which the system releases however the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
