"""The compilers that build kernels: where they are looked for, and what is said when none is found.

==========  =================================================  ====================================================
platform    a module, with host code                           device code alone, to be looked at but not run
==========  =================================================  ====================================================
CUDA        nvcc, with or without a GPU                        nvcc
HIP         hipcc of ROCm, or of DTK for gfx936                that, or any clang 19+ that knows the architecture,
                                                               such as the one inside the wheel ``ziglang``
emulated    the host's C++ compiler                            none
==========  =================================================  ====================================================
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.targets import Platform, Target

MIN_NVCC = (12, 0)
MIN_GCC = (9, 0)
MIN_CLANG = (19, 0)

# What compiles without a ROCm header or device library.
DEVICE_ONLY_FLAGS = ("--cuda-device-only", "-nogpulib", "-nogpuinc", "-S")
# Upstream clang does not know gfx936. Its code is compiled for the nearest architecture, as text: registers are
# allocated as they will be, and the instructions that only gfx936 has stay as they are written.
_NEAREST = {"gfx936": ("gfx90a", ("-D__gfx936__=1", "-fno-integrated-as"))}


class CompileFailed(RuntimeError):
    """A compiler did not accept our sources; the message has its command and what it said."""


@dataclass(frozen=True)
class Compiler:
    """A compiler on this machine.

    Attributes:
        command: how it is called, as argv.
        text: what it says about its version.
        architecture_flags: what makes it compile for the target that it was found for.
    """

    command: tuple[str, ...]
    text: str
    architecture_flags: tuple[str, ...] = ()

    def run(self, *arguments: str | Path) -> str:
        """What it printed to standard error.

        Raises:
            CompileFailed: when its exit status is not 0.
        """
        command = [*self.command, *self.architecture_flags, *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileFailed(f"{' '.join(command)}\n{(done.stdout + done.stderr).strip()}")
        return done.stderr


def find_module_compiler(target: Target) -> Compiler:
    """The compiler that builds loadable modules for this target.

    Raises:
        UnsupportedConfig: when this machine has none.
    """
    match target.platform:
        case Platform.CUDA:
            return _find_nvcc(target)
        case Platform.HIP:
            return _find_hipcc(target)
        case Platform.EMULATED:
            return _find_host_compiler()


def find_device_compiler(target: Target) -> Compiler:
    """The compiler that shows this target's device code.

    Raises:
        UnsupportedConfig: when this machine has none.
    """
    assert target.platform != Platform.EMULATED, "the emulation has no device code"
    if target.platform == Platform.CUDA:
        return _find_nvcc(target)
    nearest, flags = _NEAREST.get(target.name, (target.name, ()))
    compilers = [(command, target.name, ()) for command in _hipccs()]
    compilers += [(command, nearest, flags) for command in _clangs() if _version(_say(command)) >= MIN_CLANG]
    for command, architecture, more in compilers:
        if _compiles_for(command, architecture):
            return Compiler(command, _say(command), (f"--offload-arch={architecture}", *more))
    raise UnsupportedConfig(
        f"no compiler for {target} device code among hipcc ({_HIP_PLACES}), the wheel ziglang and clang++ on PATH",
        f"hipcc, or clang {MIN_CLANG[0]} and later where it knows {nearest}",
        "Install the wheel ziglang: pip install ziglang",
    )


def find_disassembler() -> Path:
    """``cuobjdump``: of the CUDA toolkit, or the one that Triton brings.

    Raises:
        UnsupportedConfig: when this machine has none.
    """
    triton = importlib.util.find_spec("triton")
    places = [Path(triton.origin).parent / "backends/nvidia/bin"] if triton else []
    for path in _programs("cuobjdump", (*_cuda_homes(), *places)):
        return path
    raise UnsupportedConfig(
        f"no cuobjdump in {_CUDA_PLACES} or the wheel triton", "cuobjdump of any CUDA", "Install the wheel triton"
    )


# ---- CUDA -----------------------------------------------------------------------------------------

_CUDA_PLACES = "CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda and the wheel nvidia-cuda-nvcc"


def _cuda_homes() -> Iterator[Path]:
    """Folders with a ``bin``; None stands for PATH."""
    yield from (Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home)
    yield from map(Path, os.get_exec_path())
    yield Path("/usr/local/cuda/bin")
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations if nvidia else ():
        yield from sorted(Path(folder).glob("cu*/bin"), reverse=True)


def _find_nvcc(target: Target) -> Compiler:
    architecture = target.architecture.removeprefix("sm_")
    found = []
    for path in _programs("nvcc", _cuda_homes()):
        compiler = Compiler(
            (str(path),), _say((str(path),)), (f"-gencode=arch=compute_{architecture},code=sm_{architecture}",)
        )
        if _version(compiler.text, r"release (\d+)\.(\d+)") >= MIN_NVCC:
            return compiler
        found.append(str(path))
    raise UnsupportedConfig(
        f"{target} kernels need nvcc; looked in {_CUDA_PLACES}"
        + (f", and {', '.join(found)} is too old" if found else ""),
        f"nvcc {_dotted(MIN_NVCC)} and later",
        "Install the CUDA toolkit and set CUDA_HOME, or install the wheel nvidia-cuda-nvcc",
    )


# ---- HIP ------------------------------------------------------------------------------------------

_HIP_PLACES = "ROCM_HOME, ROCM_PATH, PATH, /opt/rocm and /opt/dtk"


def _hipccs() -> Iterator[tuple[str, ...]]:
    homes = (os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm", "/opt/dtk")
    folders = [Path(home) / "bin" for home in homes if home]
    return ((str(path),) for path in _programs("hipcc", (*folders, *map(Path, os.get_exec_path()))))


def _clangs() -> Iterator[tuple[str, ...]]:
    """The clang inside the wheel ``ziglang`` first: it is the newest, and the same on every machine."""
    zig = importlib.util.find_spec("ziglang")
    if zig and zig.origin and (program := Path(zig.origin).parent / "zig").exists():
        yield (str(program), "clang")
    names = ["clang++", *(f"clang++-{major}" for major in range(30, MIN_CLANG[0] - 1, -1))]
    yield from ((found,) for name in names if (found := shutil.which(name)))


def _find_hipcc(target: Target) -> Compiler:
    found = list(_hipccs())
    for command in found:
        if _compiles_for(command, target.name):
            return Compiler(command, _say(command), (f"--offload-arch={target}",))
    stack = "Hygon's DTK" if target.name == "gfx936" else "ROCm"
    raise UnsupportedConfig(
        f"{target} kernels need {stack}'s hipcc; looked in {_HIP_PLACES}"
        + (f", and {', '.join(command for (command,) in found)} does not know {target}" if found else ""),
        f"hipcc of a {stack} that compiles for {target}",
        f"Install {stack} and set ROCM_HOME",
    )


@functools.cache
def _compiles_for(command: tuple[str, ...], architecture: str) -> bool:
    arguments = ("-x", "hip", f"--offload-arch={architecture}", *DEVICE_ONLY_FLAGS, "-o", os.devnull, os.devnull)
    return subprocess.run((*command, *arguments), check=False, capture_output=True).returncode == 0


# ---- host -----------------------------------------------------------------------------------------


def _find_host_compiler() -> Compiler:
    names = [name for name in (os.environ.get("CXX"), "g++", "c++") if name]
    for name in names:
        if (found := shutil.which(name)) is None:
            continue
        text = _say((found,))
        if "clang" in text or _version(text, r"\) (\d+)\.(\d+)") >= MIN_GCC:
            return Compiler((found,), text)
    raise UnsupportedConfig(
        f"emulated kernels need a C++ compiler; looked for {', '.join(names)} on PATH",
        f"g++ {MIN_GCC[0]} and later",
        "Install g++, or set CXX",
    )


# ---- shared ---------------------------------------------------------------------------------------


def _programs(name: str, folders: Iterable[Path]) -> Iterator[Path]:
    return (path for folder in folders if os.access(path := folder / name, os.X_OK) and path.is_file())


@functools.cache
def _say(command: tuple[str, ...]) -> str:
    """What a compiler says about its version."""
    return subprocess.run((*command, "--version"), check=False, capture_output=True, text=True).stdout


def _version(text: str, pattern: str = r"version (\d+)\.(\d+)") -> tuple[int, ...]:
    found = re.search(pattern, text)
    return tuple(map(int, found.groups())) if found else (0, 0)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
