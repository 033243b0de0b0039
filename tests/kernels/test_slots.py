"""Rows of single slots out of pages, into pages and between slots, against reference.read_rows and write_rows."""

from __future__ import annotations

import pytest
import torch
from helpers import one_thread  # noqa: F401
from machines import CONFIGS, PATTERN, Config, build_ahead, machines

from sglang_quantkv import reference as ref
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.slots import gather, move, scatter
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.reference import PagedCache

# The kernels have no collectives: the width of a wave is nothing to them.
MACHINES = machines("emulated_mma")
ONE = Config("int8", 128, 32)
EMULATED = Target("emulated_mma")


@pytest.fixture(scope="module", autouse=True)
def built(request):
    build_ahead(request, "slots")


def random_cache(config: Config, heads: int = 3) -> PagedCache:
    cache = config.cache(heads=heads)
    generator = torch.Generator().manual_seed(0)
    for records in (cache.k_records, cache.v_records):
        records.random_(0, 256, generator=generator)
    return cache


def on(device: str, cache: PagedCache) -> PagedCache:
    records = (r.to(device, copy=True) for r in (cache.k_records, cache.v_records))
    return PagedCache(*records, cache.k_block, cache.v_block)


def read(cache: PagedCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ref.read_rows(cache.k_records, cache.k_block, slots), ref.read_rows(cache.v_records, cache.v_block, slots)


def slots_of(config: Config, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(5 * config.page_size, generator=torch.Generator().manual_seed(seed))[:n]


def equal(a, b) -> bool:
    return all(torch.equal(x.cpu(), y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gather_scatter_move(config, machine):
    expected = random_cache(config)
    cache = on(machine.device, expected)
    for n in (1, 7, 100):
        slots, to = slots_of(config, n), slots_of(config, n, seed=1)
        rows = gather(cache, slots.to(machine.device), target=machine.target)
        assert equal(rows, read(expected, slots))

        ref.write_rows(expected.k_records, expected.k_block, to, rows[0].cpu())
        ref.write_rows(expected.v_records, expected.v_block, to, rows[1].cpu())
        scatter(cache, to.to(machine.device), *rows, target=machine.target)
        assert equal((cache.k_records, cache.v_records), (expected.k_records, expected.v_records))

        moved = read(expected, slots)  # n of 160 and more slots: sources and destinations overlap
        ref.write_rows(expected.k_records, expected.k_block, to, moved[0])
        ref.write_rows(expected.v_records, expected.v_block, to, moved[1])
        move(cache, to.to(machine.device), slots.to(machine.device), target=machine.target)
        assert equal((cache.k_records, cache.v_records), (expected.k_records, expected.v_records))


@pytest.mark.parametrize("machine", machines("emulated_mma", "emulated_mfma"), ids=str)
@pytest.mark.parametrize("config", [ONE], ids=str)
def test_a_rotation_reads_every_row_before_it_writes_one(config, machine):
    expected = random_cache(config)
    cache = on(machine.device, expected)
    slots = torch.arange(160)
    move(cache, slots.roll(-1).to(machine.device), slots.to(machine.device), target=machine.target)
    assert equal(read(on("cpu", cache), slots.roll(-1)), read(expected, slots))


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", [ONE], ids=str)
def test_negative_slots_are_left_out(config, machine):
    cache = config.cache(machine.device)
    slots = torch.tensor([-1, 40, -160, 41])
    rows = [
        torch.full((4, 2, block.format.row_nbytes(block.head_dim)), 7, dtype=torch.uint8, device=machine.device)
        for block in (cache.k_block, cache.v_block)
    ]
    scatter(cache, slots.to(machine.device), *rows, target=machine.target)
    expected = config.cache()
    ref.write_rows(expected.k_records, expected.k_block, slots[[1, 3]], rows[0][:2].cpu())
    ref.write_rows(expected.v_records, expected.v_block, slots[[1, 3]], rows[1][:2].cpu())
    assert equal((cache.k_records, cache.v_records), (expected.k_records, expected.v_records))


def test_what_does_not_fit_is_refused_by_name():
    cache = ONE.cache()
    slots, rows = torch.arange(4), torch.zeros(4, 2, 132, dtype=torch.uint8)
    for arguments, message in (
        ((slots.int(), rows, rows), "slots is int32 .4."),
        ((slots, rows[..., :128], rows), "k_rows is uint8 .4, 2, 128.* Supported: uint8 .4, 2, 132."),
        ((slots, rows, rows[:3]), "v_rows is uint8 .3, 2, 132."),
        ((slots, rows, rows.transpose(0, 1).contiguous().transpose(0, 1)), "v_rows has strides"),
    ):
        with pytest.raises(UnsupportedConfig, match=message):
            scatter(cache, *arguments, target=EMULATED)
    assert (cache.k_records == PATTERN).all()


def test_nothing_to_copy(monkeypatch):
    """Returns before any kernel is looked for."""
    monkeypatch.setattr("sglang_quantkv.kernels.slots.find_function", None)
    nothing = torch.zeros(0, dtype=torch.long)
    assert gather(ONE.cache(), nothing, target=EMULATED)[0].shape == (0, 2, 132)
    move(ONE.cache(), nothing, nothing, target=EMULATED)


def test_as_torch_ops():
    cache = ONE.cache()
    slots, rows = torch.arange(4), torch.zeros(4, 2, 132, dtype=torch.uint8)
    for op in (torch.ops.sglang_quantkv.gather, torch.ops.sglang_quantkv.scatter):
        torch.library.opcheck(
            op,
            (cache.k_records, cache.v_records, slots, rows, rows.clone(), "int8", 128, 32, EMULATED.name),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ("int8", "mxfp4"))
def test_offsets_beyond_4_gib(recipe):
    """Store, gather and scatter around 2 GiB, around 4 GiB and in the last page of one plane."""
    from sglang_quantkv.kernels.store import store

    config = Config(recipe, 256, 128)
    block = config.cache(pages=1).v_block
    heads = 8
    pages = 2**32 // (heads * block.nbytes) + 3
    cache = config.cache("cuda", heads=heads, pages=pages)
    assert cache.k_records.numel() > 2**32
    middle = 2**31 // (heads * block.nbytes)
    slots = torch.cat([torch.arange(128) + 128 * page for page in (1, middle, middle + 1, pages - 4, pages - 1)])
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, len(slots), heads, 256, generator=generator).bfloat16()
    store(cache, slots.cuda(), k.cuda(), v.cuda())
    rows = ref.encode(k, cache.k_block.format), ref.encode(v, cache.v_block.format)
    assert equal(read(cache, slots.cuda()), rows)
    assert equal(gather(cache, slots.cuda()), rows)
    move(cache, slots.cuda().roll(128), slots.cuda())
    assert equal(read(cache, slots.cuda().roll(128)), rows)
    touched = torch.zeros(pages, dtype=torch.bool, device="cuda")
    touched[slots.cuda() // 128] = True
    for records in (cache.k_records, cache.v_records):
        for chunk, skip in zip(records.split(512), touched.split(512)):
            assert bool((chunk[~skip] == PATTERN).all())
