"""The torch routes against the reference: pages byte for byte, attention to float32 rounding, poison bit for bit."""

from __future__ import annotations

import pytest
import torch

from sglang_quantkv import reference
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES, Operand
from sglang_quantkv.kernels import torch_routes
from sglang_quantkv.kernels.hip_routes import HipRoutes
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.reference import PagedCache

PAGES = 24


def make_cache(recipe, *, heads=2, head_dim=64, v_head_dim=None, page_size=32, fill=0xFF) -> PagedCache:
    k_block = recipe.block(Operand.K, head_dim, page_size)
    v_block = recipe.block(Operand.V, v_head_dim or head_dim, page_size)
    records = (torch.full((PAGES, heads, block.nbytes), fill, dtype=torch.uint8) for block in (k_block, v_block))
    return PagedCache(*records, k_block, v_block)


def fill_requests(cache: PagedCache, seq_lens: list[int], store=torch_routes.store) -> torch.Tensor:
    """Writes random K and V for each request into shuffled pages; unused page table entries are absurd."""
    generator = torch.Generator().manual_seed(3)
    size = cache.k_block.page_size
    free = (torch.randperm(PAGES - 1, generator=generator) + 1).tolist()
    table = torch.full((len(seq_lens), max(-(-n // size) for n in seq_lens) + 2), 2147480000, dtype=torch.int64)
    for request, length in enumerate(seq_lens):
        pages = [free.pop() for _ in range(-(-length // size))]
        table[request, : len(pages)] = torch.tensor(pages)
        positions = torch.arange(length)
        slots = table[request][positions // size] * size + positions % size
        heads = cache.k_records.shape[1]
        k, v = (
            torch.randn(length, heads, block.head_dim, generator=generator).bfloat16()
            for block in (cache.k_block, cache.v_block)
        )
        store(cache, slots, k, v)
    return table


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


AWKWARD_ROWS = {
    "zero": torch.zeros(64),
    "negative zero": torch.full((64,), -0.0),
    "constant": torch.full((64,), 0.001),
    "ties": torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4 + [127.0, 0.5, -0.5, 1.5, -1.5, 126.5, 2.5, 3.5] * 4
    ),
    "subnormal": torch.full((64,), 1e-42),
    "smallest": torch.full((64,), 1e-45),
    "huge": torch.full((64,), 3e38),
    "one nan": torch.cat((torch.ones(63), torch.tensor([float("nan")]))),
    "one inf": torch.cat((torch.tensor([float("-inf")]), torch.ones(63))),
    "clipped": torch.linspace(-7.5, 7.5, 64),
    "past the clip": torch.linspace(-7.5001, 7.5001, 64),
}


@pytest.mark.parametrize("page_size", (32, 64, 128))
@pytest.mark.parametrize("head_dim", (32, 64, 96, 128, 192, 256))
def test_pages_are_the_references_byte_for_byte(recipe, page_size, head_dim):
    def reference_store(cache, slots, k, v):
        reference.write_rows(cache.k_records, cache.k_block, slots, reference.encode(k, cache.k_block.format))
        reference.write_rows(cache.v_records, cache.v_block, slots, reference.encode(v, cache.v_block.format))

    ours, theirs = (make_cache(recipe, head_dim=head_dim, page_size=page_size) for _ in range(2))
    lengths = [1, page_size + 1, 3 * page_size - 1]
    fill_requests(ours, lengths)
    fill_requests(theirs, lengths, store=reference_store)
    assert torch.equal(ours.k_records, theirs.k_records) and torch.equal(ours.v_records, theirs.v_records)


@pytest.mark.parametrize("fmt", (RECIPES["int8"].k, RECIPES["mxfp4"].k, RECIPES["fp4_g32"].k), ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_awkward_rows_quantize_as_the_reference_does(fmt, dtype):
    x = torch.stack(list(AWKWARD_ROWS.values())).to(dtype)
    x = torch.cat([x * 2.0**e for e in (-80, -40, -3, 0, 3, 60)])
    for got, expected in zip(torch_routes.quantize(x, fmt), reference.quantize(x, fmt)):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    "params",
    (
        {},
        {"window_left": 0},
        {"window_left": 40},
        {"softcap": 3.0},
        {"sinks": torch.tensor([-torch.inf, 0.0, 5.0, 1.0, 2.0, -3.0])},
        {"window_left": 70, "softcap": 2.0, "sinks": torch.linspace(-1, 4, 6)},
    ),
    ids=lambda p: "+".join(p) or "plain",
)
def test_attention_agrees_with_the_reference(recipe, params):
    cache = make_cache(recipe)
    seq_lens, q_lens = [1, 31, 33, 150, 300], [1, 31, 1, 70, 280]
    table = fill_requests(cache, seq_lens)
    q = torch.randn(sum(q_lens), 6, 64)
    for route, args in (("extend", (seq_lens, q_lens)), ("decode", (seq_lens,))):
        queries = q if route == "extend" else q[: len(seq_lens)]
        got = getattr(torch_routes, route)(queries, cache, table, *args, scale=0.125, **params)
        expected = getattr(reference, route)(queries, cache, table, *args, scale=0.125, **params)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads, kv_heads", ((9, 3), (28, 4), (4, 1), (1, 1), (48, 2), (71, 1)))
def test_any_group_and_unequal_value_dims(recipe, heads, kv_heads):
    cache = make_cache(recipe, heads=kv_heads, head_dim=96, v_head_dim=64)
    table = fill_requests(cache, [100])
    q = torch.randn(5, heads, 96)
    got = torch_routes.extend(q, cache, table, [100], [5], scale=0.1)
    torch.testing.assert_close(got, reference.extend(q, cache, table, [100], [5], scale=0.1), rtol=1e-5, atol=1e-5)


def test_first_chunk_agrees_with_the_reference():
    q, k, v = torch.randn(320, 6, 64), torch.randn(320, 2, 64), torch.randn(320, 2, 64)
    lens = [1, 300, 19]
    params = {"scale": 0.125, "window_left": 50}
    got = torch_routes.first_chunk(q, k, v, lens, **params)
    torch.testing.assert_close(got, reference.first_chunk(q, k, v, lens, **params), rtol=1e-5, atol=1e-5)


def test_nothing_outside_the_live_slots_reaches_the_result(recipe):
    results = []
    for fill in (0, 0xFF):
        cache = make_cache(recipe, fill=fill)
        table = fill_requests(cache, [33, 95, 200])
        q = torch.randn(203, 6, 64, generator=torch.Generator().manual_seed(1))
        results.append(torch_routes.extend(q, cache, table, [33, 95, 200], [1, 2, 200], scale=0.125, window_left=90))
    assert torch.equal(*results) and results[0].isfinite().all()


@pytest.mark.parametrize("operand", (0, 1), ids=("k", "v"))
def test_a_non_finite_row_shows_in_the_queries_that_see_it_and_in_no_other(recipe, operand):
    cache, clean = make_cache(recipe), make_cache(recipe)
    table, _ = fill_requests(cache, [128, 64]), fill_requests(clean, [128, 64])
    kv = [torch.randn(1, 2, 64), torch.randn(1, 2, 64)]
    torch_routes.store(clean, table[0, 3:4] * 32 + 4, *kv)  # position 100 of request 0
    kv[operand][0, 1, 5] = torch.nan  # in KV head 1 only
    torch_routes.store(cache, table[0, 3:4] * 32 + 4, *kv)
    q = torch.randn(192, 6, 64)
    args = (table, [128, 64], [128, 64])
    got = torch_routes.extend(q, cache, *args, scale=0.125, window_left=10)
    expected = torch_routes.extend(q, clean, *args, scale=0.125, window_left=10)
    sees = torch.zeros(192, 6, dtype=torch.bool)
    sees[100:111, 3:] = True
    assert got[sees].isnan().any(-1).all()
    assert torch.equal(got[~sees], expected[~sees])


def test_calls_are_counted_by_descriptor():
    cache = make_cache(RECIPES["k8v4"], head_dim=64, v_head_dim=96)
    routes = torch_routes.TorchRoutes()
    (desc,) = routes.describe("store", cache)
    assert str(desc) == "store_k8v4_d64v96_p32_torch"
    fill_requests(cache, [3, 5], store=routes.store)
    assert routes.calls == {desc: 2}


def test_requests_without_a_cached_prefix_are_first_chunks():
    routes = torch_routes.TorchRoutes()
    ways = routes.partition([5, 9, 4, 1, 8], [5, 2, 4, 1, 1], owns_kv=True)
    assert ways == {"first_chunk": [0, 2, 3], "extend": [1], "decode": [4]}
    assert routes.partition([5, 9, 1], [5, 2, 1], owns_kv=False) == {"extend": [0, 1], "decode": [2]}


def test_short_prefixes_are_dequantized_while_there_is_room():
    class Dense:
        name, reads_prefix = "dense", True

    routes = HipRoutes(Target("emulated_mma"), Dense(), 100)
    routes._row_capacity = 200
    lengths = ([90, 60, 120, 150, 102], [90, 10, 10, 100, 2])
    # Request 2 has too long a prefix; request 3 would fit, but not after request 1; request 4 has 100 tokens cached.
    assert routes.partition(*lengths, owns_kv=True) == {
        "first_chunk": [0],
        "extend": [2, 3, 4],
        "dequantized": [1],
    }


def test_decode_allocates_nothing_that_grows_with_the_pool(recipe):
    allocated = []
    for copies in (1, 16):
        cache = make_cache(recipe)
        table = fill_requests(cache, [100, 200])
        cache = PagedCache(
            cache.k_records.repeat(copies, 1, 1), cache.v_records.repeat(copies, 1, 1), cache.k_block, cache.v_block
        )
        q = torch.randn(2, 6, 64)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            torch_routes.decode(q, cache, table, [100, 200], scale=0.125)
        allocated.append(sum(max(0, event.self_cpu_memory_usage) for event in profile.events()))
    assert allocated[0] == allocated[1] > 0


def test_a_kernel_that_cannot_be_had_is_named(monkeypatch):
    cache, routes = make_cache(RECIPES["int8"]), HipRoutes(Target("emulated_mma"), None, 0)
    errors = {
        UnsupportedConfig: UnsupportedConfig("no compiler", "a compiler", "Install one"),
        RuntimeError: OSError("undefined symbol"),
    }
    for kind, error in errors.items():

        def load(unit, target, error=error):
            if unit.phase == "extend":
                raise error

        monkeypatch.setattr("sglang_quantkv.kernels.build.load", load)
        with pytest.raises(kind, match="kernel extend_int8_d64_p32 for emulated_mma"):
            routes.prepare([cache], torch.bfloat16, 128)
    with pytest.raises(UnsupportedConfig, match="float32.*--dtype bfloat16"):
        routes.prepare([cache], torch.float32, 128)
