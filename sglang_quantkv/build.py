"""Builds kernels ahead of time: ``python -m sglang_quantkv.build --target gfx942,gfx950,sm_90``.

A server builds what it needs at its first start; an image that ships without compilers, or should start fast, is
built with this. It needs no GPU. Where a target's modules cannot be built here (AMD without ROCm), the device code
alone is compiled, which proves that it compiles and shows its registers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import DEFAULT_PAGE_SIZE, PAGE_SIZES, RECIPES, check_page_size, find_recipe
from sglang_quantkv.kernels.build import HEAD_DIMS, PHASES, Unit, build_module, cache_root, compile_device
from sglang_quantkv.kernels.device_code import Kernel, cuda_kernels
from sglang_quantkv.kernels.targets import EMULATED_MAPS, HIP_MAPS, Platform, Target, current_target, find_target
from sglang_quantkv.kernels.toolchain import CompileFailed, find_device_compiler, find_module_compiler


@dataclass(frozen=True)
class Job:
    """A unit to build for a target, as a module or, where no compiler for that is here, as device code alone."""

    unit: Unit
    target: Target
    is_module: bool

    def run(self) -> tuple[Kernel, ...]:
        """Builds; returns the kernels, none for the emulation. Raises as ``build_module`` does."""
        if not self.is_module:
            return compile_device(self.unit, self.target).kernels
        module = build_module(self.unit, self.target)
        match self.target.platform:
            case Platform.CUDA:
                return cuda_kernels(module.with_suffix(".log").read_text())
            case Platform.HIP:
                return compile_device(self.unit, self.target).kernels
            case Platform.EMULATED:
                return ()

    def __str__(self) -> str:
        return f"{self.unit} {self.target}"


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns:
        the exit status: 0, 1 when something did not compile, or 2 with a message about what cannot be built here.
    """
    args = _parse_args(argv)
    try:
        targets = [find_target(name) for name in args.target] or [current_target()]
        units = _units(args)
        is_module = {target: _can_build_module(target) for target in targets}
    except UnsupportedConfig as error:
        print(error, file=sys.stderr)
        return 2
    jobs = [Job(unit, target, is_module[target]) for target, unit in product(targets, units)]
    built, failed = _run_all(jobs, args.jobs)
    if rows := [(job, kernel) for job in jobs for kernel in built.get(job, ())]:
        print(_table(rows))
    for target in targets:
        print(_outcome(target, sum(job.target == target for job in built), is_module[target]))
    if failed:
        print(f"\n{len(failed)} of {len(jobs)} failed: {', '.join(map(str, failed))}", file=sys.stderr)
    return 1 if failed else 0


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_quantkv.build",
        description="Builds kernels ahead of a server's first start, without a GPU, and shows the registers and shared "
        "memory that each takes. Where a target's modules cannot be built (AMD without ROCm), compiles device code only.",
        epilog="Modules go to $SGLANG_QUANTKV_CACHE, or else to sglang_quantkv in the user's cache folder.",
    )

    def add(flag: str, default, parse, metavar: str, text: str) -> None:
        parser.add_argument(flag, default=default, type=parse, metavar=metavar, help=text)

    target_help = f"sm_80 and later sm_XX, {', '.join((*HIP_MAPS, *EMULATED_MAPS))} (default: this machine's GPU)"
    add("--target", [], _names, "NAME,...", target_help)
    add("--recipe", list(RECIPES), _names, "NAME,...", f"{', '.join(RECIPES)} (default: all)")
    add("--head-dim", list(HEAD_DIMS), _numbers, "D,...", f"{', '.join(map(str, HEAD_DIMS))} (default: all)")
    page_help = f"{', '.join(map(str, PAGE_SIZES))} (default: {DEFAULT_PAGE_SIZE})"
    add("--page-size", [DEFAULT_PAGE_SIZE], _numbers, "P,...", page_help)
    add("--phase", list(PHASES), _names, "NAME,...", f"{', '.join(PHASES)} (default: all)")
    add("--jobs", os.cpu_count() or 1, int, "N", "compilers at a time (default: one per core)")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _numbers(text: str) -> list[int]:
    return list(map(int, _names(text)))


def _units(args: argparse.Namespace) -> list[Unit]:
    for page_size in args.page_size:
        check_page_size(page_size)
    for head_dim in args.head_dim:
        if head_dim not in HEAD_DIMS:
            supported = f"--head-dim {', '.join(map(str, HEAD_DIMS))}"
            raise UnsupportedConfig(f"--head-dim {head_dim} has no kernels", supported, "Choose among these")
    if args.jobs < 1:
        raise UnsupportedConfig(f"--jobs {args.jobs} makes no sense", "--jobs 1 or more", "Change the value")
    recipes = dict.fromkeys(find_recipe(name).name for name in args.recipe)
    return [Unit(*parts) for parts in product(args.phase, recipes, args.head_dim, args.page_size)]


def _can_build_module(target: Target) -> bool:
    """False where this machine can only show the target's device code; refuses where it cannot even do that."""
    try:
        find_module_compiler(target)
    except UnsupportedConfig:
        if target.platform != Platform.HIP:
            raise
        find_device_compiler(target)
        return False
    return True


def _run_all(jobs: list[Job], workers: int) -> tuple[dict[Job, tuple[Kernel, ...]], list[Job]]:
    """Kernels by job, and the jobs that failed; each job is reported when it ends."""
    built, failed = {}, []

    def timed(job: Job) -> tuple[tuple[Kernel, ...], float]:
        start = time.monotonic()
        return job.run(), time.monotonic() - start

    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(timed, job): job for job in jobs}
        for count, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            where = f"[{count:{len(str(len(jobs)))}}/{len(jobs)}] {job}"
            try:
                built[job], seconds = future.result()
                print(f"{where}: {seconds:.1f} s", flush=True)
            except CompileFailed as error:
                failed.append(job)
                print(f"{where}: failed\n{error}", file=sys.stderr, flush=True)
    return built, [job for job in jobs if job in failed]


def _table(rows: list[tuple[Job, Kernel]]) -> str:
    figures = {
        "registers": "vector_registers",
        "of them acc": "accumulator_registers",
        "scalar": "scalar_registers",
        "shared": "shared_nbytes",
        "spills": "spills",
        "scalar spills": "scalar_spills",
        "stack": "stack_nbytes",
    }
    cells = [("unit", "target", "kernel", *figures)]
    for job, kernel in rows:
        numbers = (str(getattr(kernel, attribute)) for attribute in figures.values())
        cells.append((str(job.unit), str(job.target), kernel.name, *numbers))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    adjust = (str.ljust,) * 3 + (str.rjust,) * len(figures)
    lines = ["  ".join(put(cell, width) for put, cell, width in zip(adjust, line, widths)) for line in cells]
    return "\n".join(("", *lines, ""))


def _outcome(target: Target, count: int, is_module: bool) -> str:
    if is_module:
        return f"{target}: {count} modules in {cache_root()}"
    compiler = find_device_compiler(target)
    if f"--offload-arch={target}" not in compiler.architecture_flags:
        return f"{target}: {count} units as text by a compiler that does not know {target}; not assembled, not run"
    return f"{target}: {count} units, device code compiled, not run; modules need ROCm's hipcc"


if __name__ == "__main__":
    sys.exit(main())
