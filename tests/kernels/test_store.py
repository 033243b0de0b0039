"""The fused store, byte for byte against reference.store: whole records, so that nothing else may change either."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import pytest
import torch
from helpers import one_thread  # noqa: F401
from machines import CONFIGS, PATTERN, Config, Machine, build_ahead, machines, patched_sources, same_bits

from sglang_quantkv import reference as ref
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import INT8
from sglang_quantkv.kernels import build
from sglang_quantkv.kernels.store import store
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.reference import PagedCache

MACHINES = machines("emulated_mma", "emulated_mfma")
COUNTS = (1, 2, 3, 15, 16, 17, 33)
Q_HEADS = 6
MAX_POSITION = 50
ONE = Config("int8", 128, 64)
ON_EMULATION = Machine("cpu", Target("emulated_mma"))


@pytest.fixture(scope="module", autouse=True)
def built(request):
    build_ahead(request, "store")


@pytest.fixture(params=("forward", "reverse", "random"))
def order(request, monkeypatch):
    """The order in which the emulation runs the lanes."""
    monkeypatch.setenv("QUANTKV_EMULATED_ORDER", request.param)
    return request.param


# ---- inputs -----------------------------------------------------------------------------------------


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slot_patterns(n: int, page_size: int) -> dict[str, list[int]]:
    """Lists of n slots in pages 1 to 4, none twice, and -1."""
    first, last = page_size, 5 * page_size
    scattered = (first + torch.randperm(last - first, generator=generator(n))[:n]).tolist()
    swapped = list(range(first, first + n))
    swapped[1:3] = swapped[1:3][::-1]  # first and last slot of the atom are where they would be in a run
    return {
        "aligned": list(range(first, first + n)),
        "unaligned": list(range(2 * first - 7, 2 * first - 7 + n)),
        "scattered": scattered,
        "descending": list(range(first + n - 1, first - 1, -1)),
        "swapped": swapped,
        # Runs of 16 with a padded token inside, at their start, at their end.
        "padded": [-1 if i in (0, 18, 31) else first + i for i in range(n)],
        "all padded": list(range(-n, 0)),
        # Requests of 5, 20 and more tokens that start anywhere: runs begin in one window and end in the next.
        "requests": [s for start, m in ((3, 5), (40, 20), (23, 17)) for s in range(first + start, first + start + m)][
            :n
        ],
    }


def awkward_rows(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """``[rows, D]``: zeros of both signs, non-finite rows, subnormals, the largest values, ties of every format."""
    info = torch.finfo(dtype)
    rows = torch.randn(16, head_dim, generator=generator(1))
    rows[0], rows[1] = 0.0, -0.0
    rows[2, 5], rows[3, -1], rows[4, 40] = torch.nan, torch.inf, -torch.inf
    rows[5], rows[6, ::3] = info.max, -info.max
    rows[7] *= info.smallest_normal / 4
    rows[8] = 0.0
    rows[8, 3] = -info.smallest_normal * info.eps  # the least subnormal
    ties = torch.arange(head_dim) % 127 + 0.5
    rows[9] = torch.where(torch.arange(head_dim) % 3 == 0, -ties, ties)
    rows[9, 0] = 127.0  # the scale is 1
    magnitudes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    for row, power in ((10, 0), (11, -9), (12, 5)):
        rows[row] = magnitudes.repeat(head_dim // 8) * 2.0**power
        rows[row, ::5] *= -1
    rows[13, ::7], rows[14, ::7] = 7.5, 7.5 * (1 + info.eps)  # where the E8M0 scale steps up
    rows[15, 1::2] = -0.0
    return rows.to(dtype)


@dataclass(frozen=True)
class Case:
    """One call: every argument of store, all tensors on the CPU."""

    slots: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | None
    options: dict
    wants_q_out: bool
    wants_q_codes: bool
    k_out: str | None = None  # "apart", or "in place"


def rows_of_tokens(n: int, heads: int, head_dim: int, dtype: torch.dtype, layout: int, seed: int) -> torch.Tensor:
    """``[n, heads, D]`` of rows of all sizes, with awkward ones among them, in one of four memory layouts."""
    size = torch.rand(n, heads, 1, generator=generator(seed)) * 16 - 8
    x = (torch.randn(n, heads, head_dim, generator=generator(seed + 1)) * 2.0**size).to(dtype)
    awkward = awkward_rows(head_dim, dtype)
    flat = x.flatten(0, 1)
    places = torch.randperm(len(flat), generator=generator(seed + 2))[: min(len(awkward), len(flat) // 2)]
    flat[places] = awkward[torch.randperm(len(awkward), generator=generator(seed + 3))[: len(places)]]
    if layout == 0:
        return x
    if layout == 1:  # a slice of a fused projection: rows stay aligned
        wide = torch.zeros(n, (heads + 3) * head_dim, dtype=dtype)
        view = wide[:, 2 * head_dim : (heads + 2) * head_dim].unflatten(1, (heads, head_dim))
    elif layout == 2:  # heads before tokens
        view = torch.zeros(heads, n, head_dim, dtype=dtype).transpose(0, 1)
    else:  # rows at odd addresses
        view = torch.zeros(n, heads, head_dim + 3, dtype=dtype)[..., 1 : head_dim + 1]
    view.copy_(x)
    return view


@functools.cache
def cases(config: Config) -> list[tuple[str, Case, PagedCache, tuple[torch.Tensor | None, torch.Tensor]]]:
    """Calls with every token count and slot pattern, options drawn at random, and what the reference makes of them:
    the cache, and q and k normalized and rotated."""
    head_dim, found = config.head_dim, []
    for n in COUNTS:
        for pattern, slots in slot_patterns(n, config.page_size).items():
            name = f"{config}: {n} tokens, {pattern}"
            draw = random.Random(name)
            seed = draw.randrange(1 << 20)
            dtype = draw.choice((torch.bfloat16, torch.float16))
            k, v, q = (
                rows_of_tokens(n, heads, head_dim, dtype, draw.randrange(4), seed + i)
                for i, heads in enumerate((2, 2, Q_HEADS))
            )
            options = {}
            if draw.random() < 0.75:
                rotary_dim = draw.choice((head_dim, head_dim, head_dim // 2, 48, 16))
                angles = torch.rand(MAX_POSITION, rotary_dim // 2, generator=generator(seed)) * 6.3
                options["cos_sin"] = torch.cat((angles.cos(), angles.sin()), dim=-1)
                options["positions"] = torch.randint(0, MAX_POSITION, (n,), generator=generator(seed))
                options["interleaved"] = draw.random() < 0.5
            wants_q_out, wants_q_codes = draw.choice(((False, False), (True, False), (False, True), (True, True)))
            q = q if wants_q_out or wants_q_codes else None
            for weight in ("q_weight", "k_weight"):
                if draw.random() < 0.5 and (q is not None or weight == "k_weight"):
                    options[weight] = (torch.rand(head_dim, generator=generator(seed + len(options))) + 0.5).to(dtype)
                    options |= {"eps": 1e-5, "weight_offset": draw.choice((0.0, 1.0))}
            k_out = draw.choice((None, "apart", "in place"))
            case = Case(torch.tensor(slots), k, v, q, options, wants_q_out, wants_q_codes, k_out)
            expected = config.cache()
            prepared = ref.store(expected, case.slots, k, v, q, **options)
            drawn = {option: value.shape if torch.is_tensor(value) else value for option, value in options.items()}
            found.append((f"{name}, {dtype}, {drawn}, k_out {k_out}", case, expected, prepared))
    return found


def on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor on a device, with its strides and its place relative to 16 bytes."""
    offset = tensor.storage_offset() % 8
    length = offset + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (
        torch.empty(length, dtype=tensor.dtype, device=device)[offset:]
        .as_strided(tensor.shape, tensor.stride())
        .copy_(tensor)
    )


def run(cache: PagedCache, machine: Machine, case: Case) -> dict[str, torch.Tensor]:
    """Calls store on the machine; returns what it wrote of q and k."""
    move = functools.partial(on, machine.device)
    options = {name: move(value) if torch.is_tensor(value) else value for name, value in case.options.items()}
    k, outputs = move(case.k), {}
    if case.k_out:
        outputs["k_out"] = k if case.k_out == "in place" else move(case.k).fill_(torch.nan)
    if case.q is not None:
        shape = case.q.shape
        if case.wants_q_out:
            outputs["q_out"] = move(case.q).fill_(torch.nan)
        if case.wants_q_codes:
            outputs["q_codes"] = torch.zeros(shape, dtype=torch.int8, device=machine.device)
            outputs["q_scales"] = torch.zeros(shape[:2], device=machine.device)
        options["q"] = move(case.q)
    store(cache, move(case.slots), k, move(case.v), target=machine.target, **options, **outputs)
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def agree(cache: PagedCache, expected: PagedCache) -> bool:
    return all(
        torch.equal(got.cpu(), want)
        for got, want in ((cache.k_records, expected.k_records), (cache.v_records, expected.v_records))
    )


# ---- bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_bytes_are_the_references(config, machine, order):
    for name, case, expected, (q_out, k_out) in cases(config):
        cache = config.cache(machine.device)
        outputs = run(cache, machine, case)
        assert agree(cache, expected), name
        if "k_out" in outputs:
            assert same_bits(outputs["k_out"], k_out), name
        if "q_out" in outputs:
            assert same_bits(outputs["q_out"], q_out), name
        if "q_codes" in outputs:
            codes, scales = ref.quantize(q_out, INT8)
            assert torch.equal(outputs["q_codes"], codes) and same_bits(outputs["q_scales"], scales[..., 0]), name


@pytest.mark.parametrize("machine", machines("emulated_mfma_wide", "emulated_mmac")[:2], ids=str)
@pytest.mark.parametrize("config", [ONE], ids=str)
def test_the_other_maps_run_the_same_code(config, machine):
    for name, case, expected, _ in cases(config)[::9]:
        cache = config.cache()
        run(cache, machine, case)
        assert agree(cache, expected), name


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", [ONE, Config("mxfp4", 128, 128)], ids=str)
def test_padding_writes_the_dummy_page_alone(config, machine):
    """Padded tokens of a captured batch all have slot 0: any of them may win, byte by byte."""
    n, head_dim = 40, config.head_dim
    slots = torch.zeros(n, dtype=torch.long)
    slots[:19] = torch.arange(19) + config.page_size + 3
    k, v = (rows_of_tokens(n, 2, head_dim, torch.bfloat16, 0, seed) for seed in (1, 2))
    cache, expected = config.cache(machine.device), config.cache()
    run(cache, machine, Case(slots, k, v, None, {}, False, False))
    ref.store(expected, slots[:20], k[:20], v[:20])
    for got, want, block in (
        (cache.k_records.cpu(), expected.k_records, cache.k_block),
        (cache.v_records.cpu(), expected.v_records, cache.v_block),
    ):
        outside = torch.ones(block.nbytes, dtype=torch.bool)
        outside[ref.row_offsets(block)[0]] = False
        assert torch.equal(got[1:], want[1:]) and (got[0][:, outside] == PATTERN).all()


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("config", [ONE], ids=str)
@pytest.mark.parametrize("norms", (False, True))
@pytest.mark.parametrize("rotates", (False, True))
def test_q_and_k_in_place_in_one_projection(config, machine, norms, rotates):
    """As a model calls it: q, k and v are parts of one tensor, in which nothing else may change. A token without a
    slot is prepared too."""
    head_dim, sizes = config.head_dim, [heads * config.head_dim for heads in (Q_HEADS, 2, 2)]
    slots = torch.arange(35) + config.page_size + 3
    slots[[0, 17, 34]] = -1
    options = {}
    if norms:
        weight = (torch.rand(head_dim, generator=generator(5)) + 0.5).bfloat16()
        options = {"q_weight": weight, "k_weight": weight.flip(0)}
    if rotates:
        angles = torch.rand(MAX_POSITION, head_dim // 2, generator=generator(6)) * 6.3
        options |= {"cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1), "positions": torch.arange(35)}
    qkv = rows_of_tokens(35, Q_HEADS + 4, head_dim, torch.bfloat16, 0, 7).flatten(1)
    expected, cache = config.cache(), config.cache(machine.device)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=1))
    prepared = torch.cat((*ref.store(expected, slots, k, v, q, **options), v), dim=1).flatten(1)

    qkv, slots = qkv.to(machine.device), slots.to(machine.device)
    options = {name: tensor.to(machine.device) for name, tensor in options.items()}
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=1))
    store(cache, slots, k, v, q, q_out=q, k_out=k, target=machine.target, **options)
    assert agree(cache, expected) and same_bits(qkv.cpu(), prepared)


@pytest.fixture(scope="module", params=("sync_block();", "sync_wave();"))
def without_barrier(request, tmp_path_factory):
    """The module of ONE from sources that lack one barrier."""
    root = patched_sources(
        tmp_path_factory.mktemp("without_barrier"), "src/store.h", lambda text: text.replace(request.param, "", 1)
    )
    return request.param, build.load(ONE.unit("store"), ON_EMULATION.target, root)


def test_a_missing_barrier_is_caught(without_barrier, monkeypatch, order):
    """The emulation shows that V would be read from shared memory that not every lane has written."""
    barrier, module = without_barrier
    monkeypatch.setattr("sglang_quantkv.kernels.store.find_function", lambda name, *_: module[name])
    wrong = set()
    for name, case, expected, _ in cases(ONE):
        cache = ONE.cache()
        run(cache, ON_EMULATION, case)
        assert torch.equal(cache.k_records, expected.k_records)
        if not torch.equal(cache.v_records, expected.v_records):
            wrong.add(name.split(": ")[1].split(", torch")[0])
    if barrier == "sync_wave();":  # between lanes of a row that write single codes
        assert wrong >= {f"{n} tokens, scattered" for n in COUNTS}
    elif order == "random":  # between waves that write whole atoms; in the other orders they keep step
        assert wrong >= {f"{n} tokens, aligned" for n in (16, 17, 33)}


# ---- arguments --------------------------------------------------------------------------------------


def arguments(**changes) -> dict:
    """Arguments that fit, but for the changes."""
    q = torch.zeros(4, Q_HEADS, 128, dtype=torch.bfloat16)
    kv = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    fitting = {
        "cache": ONE.cache(),
        "slots": torch.arange(64, 68),
        "k": kv,
        "v": kv,
        "q": q,
        "positions": torch.arange(4),
        "cos_sin": torch.zeros(8, 64),
        "q_weight": torch.ones(128, dtype=torch.bfloat16),
        "q_out": torch.zeros_like(q),
        "k_out": torch.zeros_like(kv),
        "q_codes": torch.zeros_like(q, dtype=torch.int8),
        "q_scales": torch.zeros(4, Q_HEADS),
        "target": ON_EMULATION.target,
    }
    return fitting | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.arange(4, dtype=torch.int32)}, "slots is int32 .4. on cpu. Supported: int64 .4. on cpu"),
        ({"slots": torch.arange(8)[::2]}, "slots has strides"),
        ({"k": torch.zeros(4, 2, 128)}, "k is float32 .* Supported: bfloat16 or float16 .4, 2, 128."),
        ({"v": torch.zeros(4, 2, 128, dtype=torch.float16)}, "v is float16 .* Supported: bfloat16"),
        ({"v": torch.zeros(4, 3, 128, dtype=torch.bfloat16)}, "v is bfloat16 .4, 3, 128."),
        ({"k": torch.zeros(4, 128, 2, dtype=torch.bfloat16).transpose(1, 2)}, "with 1 as the last"),
        ({"q": torch.zeros(4, 6, 64, dtype=torch.bfloat16)}, "q is bfloat16 .4, 6, 64.* Supported: .*.4, any, 128."),
        ({"k_out": torch.zeros(4, 2, 128, dtype=torch.float16)}, "k_out is float16 .* Supported: bfloat16 .4, 2, 128."),
        ({"k_out": torch.zeros(3, 2, 128, dtype=torch.bfloat16)}, "k_out is bfloat16 .3, 2, 128."),
        ({"k_out": torch.zeros(4, 128, 2, dtype=torch.bfloat16).transpose(1, 2)}, "k_out .*with 1 as the last"),
        ({"positions": None}, "cos_sin without positions"),
        ({"cos_sin": None}, "positions without cos_sin"),
        ({"cos_sin": torch.zeros(8, 24)}, "rotary_dim 24. Supported: multiples of 16 up to head_dim 128"),
        ({"cos_sin": torch.zeros(8, 144)}, "rotary_dim 144"),
        ({"cos_sin": torch.zeros(8 * 64 + 1)[1:].view(8, 64)}, "cos_sin .*starts 4 bytes past 16"),
        ({"q_weight": torch.ones(128)}, "q_weight is float32 .* Supported: bfloat16 .128."),
        ({"q": None}, "q_weight, q_out, q_codes, q_scales without q"),
        ({"q_scales": None}, "only one of q_codes and q_scales"),
        ({"q_out": None, "q_codes": None, "q_scales": None}, "q with nothing to write"),
        (
            {"cache": Config("int8", 96, 64).cache()},
            "store kernel was asked for head_dim 96 .* Supported: one head_dim of 64, 128, 256",
        ),
        ({"target": Target("sm_90")}, "tensors on cpu with kernels for sm_90"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    given = arguments(**changes)
    with pytest.raises(UnsupportedConfig, match=message):
        store(**given)
    assert (given["cache"].k_records == PATTERN).all()


def test_arguments_that_fit():
    store(**arguments())


def test_nothing_to_store(monkeypatch):
    """Returns before any kernel is looked for."""
    monkeypatch.setattr("sglang_quantkv.kernels.store.find_function", None)
    empty = torch.zeros(0, 2, 128, dtype=torch.bfloat16)
    store(ONE.cache(), torch.zeros(0, dtype=torch.long), empty, empty, target=ON_EMULATION.target)


def test_as_a_torch_op():
    """Schema, aliasing and fake implementation are what torch.compile needs."""
    given = arguments(interleaved=False, k_weight=None, weight_offset=0.0, eps=1e-6)
    cache = given["cache"]
    names = (
        "slots",
        "k",
        "v",
        "q",
        "positions",
        "cos_sin",
        "interleaved",
        "q_weight",
        "k_weight",
        "weight_offset",
        "eps",
    )
    values = [given[name] for name in (*names, "q_out", "k_out", "q_codes", "q_scales")]
    torch.library.opcheck(
        torch.ops.sglang_quantkv.store,
        (cache.k_records, cache.v_records, *values, ONE.recipe, ONE.page_size, given["target"].name),
        test_utils=("test_schema", "test_faketensor"),
    )
