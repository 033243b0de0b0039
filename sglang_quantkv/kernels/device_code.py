"""What a compiler made of kernels: registers, shared memory, spills, and the instructions themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_quantkv.kernels.toolchain import Compiler, find_disassembler


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.

    Attributes:
        name: demangled, without the namespace, the parameters and the unit's own configuration.
        vector_registers: per lane; on AMD with those of the accumulation file.
        shared_nbytes: LDS or shared memory that the kernel declares; what a launch adds is not in it.
        spills: vector registers (AMD) or bytes (NVIDIA) that did not fit and went to memory.
        stack_nbytes: private memory of one lane.
        accumulator_registers: AMD's accumulation file alone.
        scalar_registers: AMD's, per wave.
        scalar_spills: scalar registers that went to lanes of vector registers.
        assembly: its instructions; empty where only the figures were asked for.
    """

    name: str
    vector_registers: int
    shared_nbytes: int
    spills: int
    stack_nbytes: int
    accumulator_registers: int = 0
    scalar_registers: int = 0
    scalar_spills: int = 0
    assembly: str = ""


@dataclass(frozen=True)
class DeviceCode:
    """The kernels of one unit. They were compiled, not run.

    Attributes:
        compiler: what compiled them; for which architecture is in its flags.
    """

    compiler: Compiler
    kernels: tuple[Kernel, ...]


def amd_kernels(assembly: str) -> tuple[Kernel, ...]:
    """The kernels in assembly text that clang wrote."""
    metadata = re.search(r"^amdhsa\.kernels:\n(.*?)^amdhsa\.", assembly, re.MULTILINE | re.DOTALL)
    # A kernel is an item of a YAML list; its own keys stand at indent 4, those of its arguments deeper.
    items = re.split(r"^  - ", metadata[1], flags=re.MULTILINE)[1:] if metadata else []
    kernels = []
    for item in items:
        value = dict(re.findall(r"^(?:    )?\.(\w+): +(\S+)$", item, re.MULTILINE))
        body = re.search(rf"^{re.escape(value['name'])}:(.*?)^\.Lfunc_end", assembly, re.MULTILINE | re.DOTALL)
        kernels.append(
            Kernel(
                name=value["name"],
                vector_registers=int(value["vgpr_count"]),
                accumulator_registers=int(value.get("agpr_count", 0)),
                scalar_registers=int(value["sgpr_count"]),
                shared_nbytes=int(value["group_segment_fixed_size"]),
                spills=int(value["vgpr_spill_count"]),
                scalar_spills=int(value["sgpr_spill_count"]),
                stack_nbytes=int(value["private_segment_fixed_size"]),
                assembly=body[1],
            )
        )
    return _demangled(kernels)


def cuda_kernels(log: str, cubin: Path | None = None) -> tuple[Kernel, ...]:
    """The kernels that ``ptxas -v`` wrote about, with the assembly of ``cubin``."""
    assembly = _disassemble(cubin) if cubin else {}
    kernels = []
    for about in re.split(r"Compiling entry function '", log)[1:]:
        name = about.split("'", 1)[0]
        figures = (
            r"Used (\d+) registers",
            r"(\d+) bytes smem",
            r"(\d+) bytes spill stores",
            r"(\d+) bytes stack frame",
        )
        registers, shared, spills, stack = (int(found[1]) if (found := re.search(f, about)) else 0 for f in figures)
        kernels.append(Kernel(name, registers, shared, spills, stack, assembly=assembly.get(name, "")))
    return _demangled(kernels)


def _disassemble(cubin: Path) -> dict[str, str]:
    """SASS of each kernel, without the encodings."""
    text = subprocess.run(
        [find_disassembler(), "--dump-sass", cubin], capture_output=True, text=True, check=True
    ).stdout
    functions = re.split(r"^\s*Function : (\S+)$", re.sub(r" */\* 0x[0-9a-f]+ \*/", "", text), flags=re.MULTILINE)
    return dict(zip(functions[1::2], functions[2::2], strict=True))


def _demangled(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    kernels = tuple(kernels)
    if shutil.which("c++filt") is None:
        return kernels
    mangled = "\n".join(kernel.name for kernel in kernels)
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True, check=True).stdout.splitlines()
    return tuple(Kernel(**vars(kernel) | {"name": _short(name)}) for kernel, name in zip(kernels, names, strict=True))


def _short(name: str) -> str:
    """``void quantkv::f<quantkv::CacheConfig<...>, (quantkv::Element)1>(quantkv::Params)`` as ``f<1>``."""
    name = name.removeprefix("void ").replace("quantkv::", "")
    name = re.sub(r"\(\w+\)(?=[\d-])|\([^()]*\)$", "", name)
    return re.sub(r"CacheConfig<[^<>]*>(, | (?=>))?", "", name).replace("<>", "")
