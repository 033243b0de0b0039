"""Single slots: their rows into packed buffers, back into pages, and from slot to slot."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_quantkv.kernels.arguments import check_cache, check_tensor, find_device_target, find_function
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.units import unit_of
from sglang_quantkv.reference import PagedCache


def gather(cache: PagedCache, slots: Tensor, *, target: Target | None = None) -> tuple[Tensor, Tensor]:
    """Reads the rows of slots, as ``reference.read_rows`` does for K and for V.

    Args:
        slots: int64 ``[n]``, inside the pool.
        target: whose kernels run; this machine's if left out.

    Returns:
        uint8 ``[n, Hkv, row_nbytes]`` of K and of V: the codes of a row, then its scales.

    Raises:
        UnsupportedConfig: for arguments that do not fit, or a cache without a kernel.
    """
    heads, device = check_cache(cache)
    rows = tuple(
        torch.empty(len(slots), heads, block.format.row_nbytes(block.head_dim), dtype=torch.uint8, device=device)
        for block in (cache.k_block, cache.v_block)
    )
    _copy(True, cache, slots, *rows, target)
    return rows


def scatter(cache: PagedCache, slots: Tensor, k_rows: Tensor, v_rows: Tensor, *, target: Target | None = None) -> None:
    """Writes rows into slots, in place, as ``reference.write_rows`` does for K and for V.

    Args:
        slots: int64 ``[n]``, no two equal; a row with a negative slot is not written.
        k_rows, v_rows: uint8 ``[n, Hkv, row_nbytes]``, as ``gather`` returns them.
        target: whose kernels run; this machine's if left out.

    Raises:
        UnsupportedConfig: for arguments that do not fit, or a cache without a kernel.
    """
    _copy(False, cache, slots, k_rows, v_rows, target)


def move(cache: PagedCache, to: Tensor, source: Tensor, *, target: Target | None = None) -> None:
    """Copies the rows of slots ``source`` into slots ``to``, both int64 ``[n]``, which may overlap: every row is
    read before any is written. Otherwise as ``gather`` and ``scatter``."""
    scatter(cache, to, *gather(cache, source, target=target), target=target)


def _copy(
    gathers: bool, cache: PagedCache, slots: Tensor, k_rows: Tensor, v_rows: Tensor, target: Target | None
) -> None:
    heads, device = check_cache(cache)
    unit = unit_of("slots", cache)
    check_tensor("slots", slots, (None,), (torch.int64,), device, packed=False)
    for name, rows, block in (("k_rows", k_rows, cache.k_block), ("v_rows", v_rows, cache.v_block)):
        shape = (len(slots), heads, block.format.row_nbytes(block.head_dim))
        check_tensor(name, rows, shape, (torch.uint8,), device)
    name = find_device_target(device, target).name
    if len(slots):
        op = torch.ops.sglang_quantkv.gather if gathers else torch.ops.sglang_quantkv.scatter
        op(cache.k_records, cache.v_records, slots, k_rows, v_rows, unit.recipe, unit.head_dim, unit.page_size, name)


@torch.library.custom_op("sglang_quantkv::gather", mutates_args=("k_rows", "v_rows"))
def _gather(
    k_records: Tensor,
    v_records: Tensor,
    slots: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    recipe: str,
    head_dim: int,
    page_size: int,
    target: str,
) -> None:
    function = find_function("gather", "slots", recipe, head_dim, page_size, target)
    function(k_records, v_records, slots, k_rows, v_rows)


@torch.library.custom_op("sglang_quantkv::scatter", mutates_args=("k_records", "v_records"))
def _scatter(
    k_records: Tensor,
    v_records: Tensor,
    slots: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    recipe: str,
    head_dim: int,
    page_size: int,
    target: str,
) -> None:
    function = find_function("scatter", "slots", recipe, head_dim, page_size, target)
    function(k_records, v_records, slots, k_rows, v_rows)


@_gather.register_fake
@_scatter.register_fake
def _(*arguments) -> None:
    pass
