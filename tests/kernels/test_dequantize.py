"""Ranges of cached tokens as rows, bit for bit against reference.decode_rows: whole outputs, so that no other row may
change."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from helpers import one_thread  # noqa: F401
from machines import CONFIGS, Config, Machine, build_ahead, machines, same_bits
from torch.nn.functional import pad

from sglang_quantkv import reference as ref
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.dequantize import dequantize
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.reference import PagedCache

MACHINES = machines("emulated_mma", "emulated_mfma")
DTYPES = (torch.bfloat16, torch.float16)
HEADS = 3
ONE = Config("int8", 128, 64)
EMULATED = Target("emulated_mma")
UNUSED_ENTRY = 2147480000  # of a page table: no page of any pool
POISON = 0xFF  # unused pages: scales are NaN, E8M0 bytes 255
UNTOUCHED = 77.0
GUARD = 64  # rows before and after an output


@pytest.fixture(scope="module", autouse=True)
def built(request):
    build_ahead(request, "dequantize")


def ranges_of(page_size: int) -> list[tuple[int, int]]:
    """Begins and ends inside pages and at their edges, with pages before and after; three requests are empty."""
    return [
        (5, page_size + 3),
        (0, 1),
        (page_size + 7, page_size + 7),
        (0, page_size),
        (page_size - 1, page_size + 1),
        (2 * page_size + 13, 3 * page_size - 1),
        (0, 0),
        (0, 2 * page_size + 31),
        (page_size + 9, page_size + 4),  # as good as empty
        (page_size + 17, page_size + 20),
    ]


def encoded_rows(n: int, block, generator: torch.Generator) -> torch.Tensor:
    """uint8 ``[n, HEADS, row_nbytes]``: rows of all sizes, some of zeros, some not finite, and some with random codes
    beside usual scales and beside NaN."""
    x = torch.randn(n, HEADS, block.head_dim, generator=generator)
    x *= 2.0 ** (torch.rand(n, HEADS, 1, generator=generator) * 60 - 30)
    places = torch.randperm(n, generator=generator)
    x[places[0]], x[places[1]] = 0.0, -0.0
    x[places[2], 0, 5], x[places[3], 1, -1], x[places[4], 2, 40] = torch.nan, torch.inf, -torch.inf
    x[places[5:7]] = 1.0
    rows = ref.encode(x, block.format)
    rows[places[7]] = ref.encode(torch.full_like(x[0], torch.nan), block.format)
    codes = rows[places[5:8], :, : block.format.code_nbytes(block.head_dim)]
    rows[places[5:8], :, : codes.shape[-1]] = codes.random_(0, 256, generator=generator)
    return rows


@dataclass(frozen=True)
class Problem:
    """Arguments of dequantize on the CPU, and what must come out in either dtype."""

    cache: PagedCache
    page_table: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    row_starts: torch.Tensor
    rows: torch.Tensor  # those that are written
    k: torch.Tensor  # float32 [len(rows), HEADS, D]
    v: torch.Tensor
    num_rows: int

    @property
    def max_tokens(self) -> int:
        return int((self.ends - self.begins).max())


@functools.cache
def problem(config: Config) -> Problem:
    generator = torch.Generator().manual_seed(config.page_size + config.head_dim)
    ranges, size = ranges_of(config.page_size), config.page_size
    cache = config.cache(heads=HEADS, pages=30, pattern=POISON)
    free_pages = iter(torch.randperm(30, generator=generator).tolist())
    page_table = torch.full((len(ranges), 4), UNUSED_ENTRY, dtype=torch.int32)
    row_starts, slots, rows, next_row = [], [], [], 1
    for request, (begin, end) in enumerate(ranges):
        for page in range(begin // size, -(-end // size) if end > begin else 0):
            page_table[request, page] = next(free_pages)
        tokens = torch.arange(begin, max(begin, end))
        slots.append(page_table[request].long()[tokens // size] * size + tokens % size)
        row_starts.append(next_row)
        rows.append(next_row + tokens - begin)
        next_row += len(tokens) + request % 3  # gaps between some of them
    slots = torch.cat(slots)
    for records, block in ((cache.k_records, cache.k_block), (cache.v_records, cache.v_block)):
        ref.write_rows(records, block, slots, encoded_rows(len(slots), block, generator))
    begins, ends = torch.tensor(ranges, dtype=torch.int32).unbind(1)
    starts = torch.tensor(row_starts, dtype=torch.int32)
    lengths = begins.contiguous(), ends.contiguous(), starts
    return Problem(cache, page_table, *lengths, torch.cat(rows), *cache.read(slots), next_row)


def outputs(num_rows: int, config: Config, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """K's and V's, inside larger tensors, which are the base of each."""
    shape = (num_rows + 2 * GUARD, HEADS, config.head_dim)
    return [torch.full(shape, UNTOUCHED, dtype=dtype, device=device)[GUARD:-GUARD] for _ in "kv"]


def run(config: Config, machine: Machine, dtype: torch.dtype, max_tokens: int | None = None, num_rows: int = 0):
    """Calls dequantize on the machine; K's and V's outputs with the guard rows around them, on the CPU."""
    p = problem(config)
    cache = PagedCache(
        p.cache.k_records.to(machine.device), p.cache.v_records.to(machine.device), p.cache.k_block, p.cache.v_block
    )
    table = pad(p.page_table, (1, 2), value=UNUSED_ENTRY).to(machine.device)[:, 1:-2]  # a slice of a wider one
    lengths = (x.to(machine.device) for x in (p.begins, p.ends, p.row_starts))
    outs = outputs(num_rows or p.num_rows, config, dtype, machine.device)
    dequantize(cache, table, *lengths, *outs, max_tokens or p.max_tokens, target=machine.target)
    return [out._base.cpu() for out in outs]


def expected(config: Config, dtype: torch.dtype, kept: torch.Tensor, num_rows: int = 0) -> list[torch.Tensor]:
    """What ``run`` must return where the rows ``kept``, a mask of the problem's, are written."""
    p = problem(config)
    outs = outputs(num_rows or p.num_rows, config, dtype, "cpu")
    for out, values in zip(outs, (p.k, p.v)):
        out[p.rows[kept]] = values[kept].to(dtype)
    return [out._base for out in outs]


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bits_are_the_references(config, machine):
    for dtype in DTYPES:
        want = expected(config, dtype, torch.ones_like(problem(config).rows, dtype=torch.bool))
        for name, got, values in zip("kv", run(config, machine, dtype), want):
            assert same_bits(got, values), (name, dtype)


@pytest.mark.parametrize("machine", machines("emulated_mfma_wide", "emulated_mmac")[:2], ids=str)
@pytest.mark.parametrize("config", [ONE], ids=str)
def test_the_other_maps_run_the_same_code(config, machine):
    want = expected(config, torch.bfloat16, torch.ones_like(problem(config).rows, dtype=torch.bool))
    assert all(map(same_bits, run(config, machine, torch.bfloat16), want))


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", [ONE, Config("mxfp4", 128, 128)], ids=str)
def test_what_max_tokens_and_the_outputs_have_no_room_for_is_left_out(config, machine):
    p = problem(config)
    within = torch.cat([torch.arange(max(0, length)) for length in (p.ends - p.begins).tolist()])
    for max_tokens in (1, 32, 33, 10**12):
        want = expected(config, torch.bfloat16, within < max_tokens)
        assert all(map(same_bits, run(config, machine, torch.bfloat16, max_tokens), want))
    num_rows = int(p.row_starts[(p.ends - p.begins).argmax()]) + 40  # the last request starts past the end
    want = expected(config, torch.bfloat16, p.rows < num_rows, num_rows)
    assert all(map(same_bits, run(config, machine, torch.bfloat16, num_rows=num_rows), want))


@pytest.mark.parametrize("machine", machines("emulated_mma"), ids=str)
@pytest.mark.parametrize("config", [Config("int8", 256, 128)], ids=str)
def test_offsets_beyond_4_gib(config, machine):
    """Of pages and of rows. Only what is read and written takes memory of the host."""
    heads, size, block = 8, config.page_size, config.cache(pages=1).k_block
    pages, rows = 2**32 // (heads * block.nbytes) + 2, 2**31 // (heads * config.head_dim) + size
    records = torch.empty(pages, heads, block.nbytes, dtype=torch.uint8, device=machine.device)
    records[-1].random_(0, 64)  # scales are small
    cache = PagedCache(records, records, block, config.cache(pages=1).v_block)
    outs = [torch.empty(rows, heads, config.head_dim, dtype=torch.bfloat16, device=machine.device) for _ in "kv"]
    assert records.numel() > 2**32 and outs[0].nbytes > 2**32
    numbers = ([[pages - 1]], [3], [size], [rows - size + 3])
    arguments = (torch.tensor(x, dtype=torch.int32, device=machine.device) for x in numbers)
    dequantize(cache, *arguments, *outs, size, target=machine.target)
    last = PagedCache(records[-1:].cpu(), records[-1:].cpu(), cache.k_block, cache.v_block)
    for out, values in zip(outs, last.read(torch.arange(3, size))):
        assert same_bits(out[3 - size :].cpu(), values.bfloat16())


# ---- arguments --------------------------------------------------------------------------------------


def arguments(**changes) -> dict:
    """Arguments that fit, but for the changes."""
    out = torch.zeros(10, 2, 128, dtype=torch.bfloat16)
    numbers = torch.tensor([0, 4], dtype=torch.int32)
    fitting = {
        "cache": ONE.cache(),
        "page_table": torch.ones(2, 3, dtype=torch.int32),
        "begins": numbers,
        "ends": numbers + 5,
        "row_starts": torch.tensor([0, 5], dtype=torch.int32),
        "k_out": out,
        "v_out": out.clone(),
        "max_tokens": 5,
        "target": EMULATED,
    }
    return fitting | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begins": torch.zeros(2, dtype=torch.long)}, "begins is int64 .2. on cpu. Supported: int32 .any. on cpu"),
        ({"ends": torch.zeros(3, dtype=torch.int32)}, "ends is int32 .3.* Supported: int32 .2."),
        ({"row_starts": torch.zeros(4, dtype=torch.int32)[::2]}, "row_starts has strides"),
        ({"page_table": torch.zeros(3, 3, dtype=torch.int32)}, "page_table is int32 .3, 3.* Supported: int32 .2, any."),
        ({"k_out": torch.zeros(10, 2, 128)}, "k_out is float32 .* Supported: bfloat16 or float16 .any, 2, 128."),
        (
            {"v_out": torch.zeros(10, 2, 128, dtype=torch.float16)},
            "v_out is float16 .* Supported: bfloat16 .10, 2, 128.",
        ),
        ({"v_out": torch.zeros(9, 2, 128, dtype=torch.bfloat16)}, "v_out is bfloat16 .9, 2, 128."),
        ({"k_out": torch.zeros(10, 4, 128, dtype=torch.bfloat16)[:, :2]}, "k_out has strides"),
        (
            {"cache": Config("int8", 96, 64).cache()},
            "dequantize kernel was asked for head_dim 96 .* Supported: one head_dim of 64, 128, 256",
        ),
        ({"target": Target("sm_90")}, "tensors on cpu with kernels for sm_90"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    given = arguments(**changes)
    with pytest.raises(UnsupportedConfig, match=message):
        dequantize(**given)
    assert not given["k_out"].any()


def test_arguments_that_fit():
    given = arguments()
    dequantize(**given)
    assert given["k_out"].all() and given["v_out"].all()


def test_nothing_to_read(monkeypatch):
    """Returns before any kernel is looked for."""
    monkeypatch.setattr("sglang_quantkv.kernels.dequantize.find_function", None)
    none = torch.zeros(0, dtype=torch.int32)
    dequantize(**arguments(begins=none, ends=none, row_starts=none, page_table=none.view(0, 3), max_tokens=0))
    dequantize(**arguments(max_tokens=0))
    dequantize(**arguments(**dict.fromkeys(("k_out", "v_out"), torch.zeros(0, 2, 128, dtype=torch.float16))))


def test_as_a_torch_op():
    """Schema, aliasing and fake implementation are what torch.compile needs."""
    given = arguments()
    cache = given["cache"]
    names = ("page_table", "begins", "ends", "row_starts", "k_out", "v_out", "max_tokens")
    torch.library.opcheck(
        torch.ops.sglang_quantkv.dequantize,
        (cache.k_records, cache.v_records, *map(given.get, names), ONE.recipe, ONE.page_size, EMULATED.name),
        test_utils=("test_schema", "test_faketensor"),
    )
