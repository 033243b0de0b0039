"""The compile stage: what each compiler makes of every kernel, on a machine without any of the GPUs.

It shows that the kernels compile, fit into registers, and use the matrix units and wide loads that they were written
for. It does not show that they run: results come from the emulation and from GPUs. gfx936's code is text by a compiler
that does not know it, with its instructions as they are written.
"""

import importlib.util
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES
from sglang_quantkv.kernels.build import PHASES, Unit, compile_device, module_arguments
from sglang_quantkv.kernels.targets import Platform, Target
from sglang_quantkv.kernels.toolchain import Compiler, find_device_compiler

TARGETS = tuple(map(Target, ("gfx942", "gfx950", "gfx90a", "gfx936", "sm_80", "sm_90")))
PAGE_SIZE = 64

# Matrix instructions: on int8 operands, and on bf16. On NVIDIA, mma.sync and wgmma.
INT8 = {
    "gfx942": r"v_mfma_i32_16x16x32_i8",
    "gfx950": r"v_mfma_i32_16x16x(32|64)_i8",
    "gfx90a": r"v_mfma_i32_16x16x16i8",
    "gfx936": r"v_mmac_i32_16x16x32_i8",
    "sm": r"(IMMA|IGMMA)\.\S*\.S8\.S8",
}
BF16 = {"gfx936": r"v_mmac_f32_16x16x16_bf16", "gfx": r"v_mfma_f32_16x16x\d+_?bf16", "sm": r"(HMMA|HGMMA)\.\S*\.BF16"}
LOADS_16_BYTES = {"gfx": r"(global|buffer)_load(_lds)?_dwordx4", "sm": r"(LDG|LDGSTS)\.E\S*\.128|UBLKCP"}

# Every phase and recipe at the most common head dim; at others what differs, attention's registers, on one target each
# of AMD's and NVIDIA's.
CASES = tuple(
    (Unit(phase, recipe, head_dim, PAGE_SIZE), target)
    for phase, recipe, head_dim, target in product(PHASES, RECIPES, (64, 128, 256), TARGETS)
    if head_dim == 128
    or (phase in ("decode", "extend") and recipe in ("int8", "mxfp4") and target.name in ("gfx942", "sm_90"))
)
ATTENTION = tuple(case for case in CASES if case[0].phase in ("decode", "extend"))


def of(patterns, target):
    """The pattern of the longest name that this target's begins with."""
    return patterns[max((name for name in patterns if target.name.startswith(name)), key=len)]


@cache
def reason_to_skip(target):
    if target.platform == Platform.CUDA:
        try:
            find_device_compiler(target)
        except UnsupportedConfig as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def compiled(request, measured):
    """``compiled(case)``: its kernels. All cases at hand are compiled side by side."""
    tests = [item for item in request.session.items if item.module is request.module]
    cases = dict.fromkeys(item.callspec.params["case"] for item in tests if "case" in item.callspec.params)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {case: pool.submit(compile_device, *case) for case in cases if not reason_to_skip(case[1])}

        def kernels(case):
            if reason := reason_to_skip(case[1]):
                pytest.skip(reason)
            return futures[case].result().kernels

        yield kernels
        pool.shutdown(cancel_futures=True)
    done = {case: f.result().kernels for case, f in futures.items() if not f.cancelled() and not f.exception()}
    for line in table(done):
        measured(line)


def table(done):
    """Lines of a table: a kernel in each row, a target in each column."""
    cells = {}
    for (unit, target), kernels in done.items():
        for kernel in kernels:
            figures = f"{kernel.vector_registers}/{kernel.shared_nbytes}"
            cells.setdefault(f"{unit} {kernel.name}", {})[target] = figures
    width = max(map(len, cells), default=0)
    title = "registers per lane / bytes of shared memory declared; compiled, not run"
    return [
        title,
        " " * width + "".join(f"{target!s:>12}" for target in TARGETS),
        *(f"{row:{width}}" + "".join(f"{found.get(t, '-'):>12}" for t in TARGETS) for row, found in cells.items()),
    ]


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


@each(CASES)
def test_nothing_goes_to_memory_for_lack_of_registers(case, compiled):
    kernels = compiled(case)
    assert kernels
    assert {k.name: (k.spills, k.stack_nbytes) for k in kernels if k.spills or k.stack_nbytes} == {}


@each(CASES)
def test_loads_of_16_bytes(case, compiled):
    assert any(re.search(of(LOADS_16_BYTES, case[1]), kernel.assembly) for kernel in compiled(case))


@each(ATTENTION)
def test_matrix_instructions(case, compiled):
    """Scores are int8 products in every recipe; so are outputs over int8 values, and bf16 ones over 4-bit values."""
    unit, target = case
    assembly = "".join(kernel.assembly for kernel in compiled(case))
    assert re.search(of(INT8, target), assembly)
    if target.name == "gfx950" and RECIPES[unit.recipe].k.code_bits == 8:  # a block of 4-bit codes is one step of 32
        assert "v_mfma_i32_16x16x64_i8" in assembly
    assert bool(re.search(of(BF16, target), assembly)) == (RECIPES[unit.recipe].v.code_bits == 4)


# ---- modules for ROCm -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rocm_home(tmp_path_factory):
    """HIP's headers, which Triton brings, laid out as ROCm lays them out."""
    home = tmp_path_factory.mktemp("rocm")
    triton = Path(importlib.util.find_spec("triton").origin).parent
    (home / "include").symlink_to(triton / "backends/amd/include")
    (home / "share/hip").mkdir(parents=True)
    (home / "share/hip/version").write_text("HIP_VERSION_MAJOR=7\nHIP_VERSION_MINOR=1\nHIP_VERSION_PATCH=0\n")
    return home


@pytest.mark.skipif(
    shutil.which("clang++-19") is None, reason="the headers of HIP want the headers of Debian's clang-19"
)
@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("phase", PHASES)
def test_module_source_with_the_headers_of_hip(phase, side, rocm_home, tmp_path):
    """Both passes of hipcc over what ROCm machines build, checked by clang; nothing is linked."""
    source = tmp_path / "unit.hip"
    source.write_text(Unit(phase, "k8v4", 128, PAGE_SIZE).module_source)
    compiler = Compiler(
        ("clang++-19",), "", ("--offload-arch=gfx942", f"--cuda-{side}-only", f"--rocm-path={rocm_home}")
    )
    compiler.run("-nogpulib", "-fsyntax-only", *module_arguments(Target("gfx942")), source)
