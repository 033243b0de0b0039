"""Where kernels are tested: on the host emulation everywhere, and on the GPU where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_quantkv.formats import RECIPES
from sglang_quantkv.kernels.build import HEAD_DIMS, HIP_ROOT, Unit, build_module
from sglang_quantkv.kernels.targets import Target, current_target
from sglang_quantkv.reference import PagedCache

PATTERN = 0xA5  # what records hold before a test


@dataclass(frozen=True)
class Machine:
    device: str
    target: Target

    def __str__(self) -> str:
        return self.target.name


def machines(*emulated: str) -> list:
    """Parameters for tests: the emulated targets, then the GPU."""
    found = [Machine("cpu", Target(name)) for name in emulated]
    if torch.cuda.is_available():
        found.append(pytest.param(Machine("cuda", current_target()), marks=pytest.mark.gpu))
    return found


@dataclass(frozen=True)
class Config:
    """A kind of cache, as a unit is compiled for."""

    recipe: str
    head_dim: int
    page_size: int

    def __str__(self) -> str:
        return f"{self.recipe}-d{self.head_dim}-p{self.page_size}"

    def unit(self, phase: str) -> Unit:
        return Unit(phase, self.recipe, self.head_dim, self.page_size)

    def cache(self, device: str = "cpu", *, heads: int = 2, pages: int = 5, pattern: int = PATTERN) -> PagedCache:
        blocks = [RECIPES[self.recipe].block(operand, self.head_dim, self.page_size) for operand in "kv"]
        records = (torch.full((pages, heads, b.nbytes), pattern, dtype=torch.uint8, device=device) for b in blocks)
        return PagedCache(*records, *blocks)


# Every recipe with every head dim, every page size with every recipe and with every head dim.
CONFIGS = [
    Config(recipe, head_dim, (64, 32, 128)[(i + j) % 3])
    for i, recipe in enumerate(RECIPES)
    for j, head_dim in enumerate(HEAD_DIMS)
]


def build_ahead(request: pytest.FixtureRequest, phase: str) -> None:
    """Builds what the selected tests of the module need, as many at a time as there are cores."""
    wanted = set()
    for item in request.session.items:
        params = getattr(item, "callspec", None) and item.callspec.params
        if item.path == request.path and params and {"config", "machine"} <= params.keys():
            wanted.add((params["config"].unit(phase), params["machine"].target))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda module: build_module(*module), wanted))


def patched_sources(folder: Path, name: str, patch: Callable[[str], str]) -> Path:
    """A copy of the kernels' sources in ``folder`` with one file changed."""
    root = shutil.copytree(HIP_ROOT, folder / "hip")
    text = (root / name).read_text()
    patched = patch(text)
    assert patched != text, f"{name} is not what the patch expects"
    (root / name).write_text(patched)
    return root


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of 16-bit or 32-bit floats, signs of zeros included; one NaN is as good as another."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    nan = a.isnan()
    return (
        a.dtype == b.dtype
        and torch.equal(nan, b.isnan())
        and torch.equal(a.contiguous().view(ints)[~nan], b.contiguous().view(ints)[~nan])
    )
