"""Attention of reference.py: against torch's SDPA in float64 with explicit masks, over pages packed by permutes."""

import itertools
import math

import pytest
import torch
from helpers import (
    HEAD_DIMS,
    PAGE_SIZES,
    RECIPES,
    head_block,
    one_thread,  # noqa: F401
    padding_nbytes,
    quantize,
    randn,
)
from torch.nn.functional import scaled_dot_product_attention

from sglang_quantkv import reference as ref
from sglang_quantkv.formats import Operand, find_recipe

UNUSED = 2147480000  # fills the page table where no kernel may look
# float32 sums of up to 256 products and some hundred probabilities, against float64.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def expected_attention(q, k, v, *, scale, window_left=-1, softcap=0.0, sinks=None):
    """float64 of one request: the mask is written out, a sink is one more key with a zero value.

    The scores go in as SDPA's additive mask (its own are zero), since it knows no soft-cap.
    """
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    query = torch.arange(k.shape[1])[-q.shape[1] :, None]
    key = torch.arange(k.shape[1])
    hidden = key > query
    if window_left >= 0:
        hidden |= key < query - window_left
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[1], 1)), dim=-1)
        v = torch.cat((v, v.new_zeros(len(v), 1, v.shape[2])), dim=1)
    zeros = v.new_zeros(len(v), v.shape[1], 1)
    return scaled_dot_product_attention(zeros[:, : q.shape[1]], zeros, v, attn_mask=scores).transpose(0, 1)


class Pool:
    """Requests' K and V, quantized and packed by the helpers into pages in random order; all else is ``fill``."""

    def __init__(self, recipe, page, keys, values, fill=0xFF, seed=0):
        used = [-(-len(k) // page) for k in keys]
        order = (1 + torch.randperm(sum(used) + 2, generator=torch.Generator().manual_seed(seed))).tolist()
        self.page_table = torch.full((len(keys), max(used) + 2), UNUSED, dtype=torch.int32)
        slots = []
        for request, k in enumerate(keys):
            pages = torch.tensor([order.pop() for _ in range(used[request])])
            self.page_table[request, : used[request]] = pages
            slots.append((pages[:, None] * page + torch.arange(page)).flatten()[: len(k)])
        packed, blocks = [], []
        self.k, self.v = [], []  # what each request's tokens read back as
        for name, operand, rows, read in zip(RECIPES[recipe], "kv", (keys, values), (self.k, self.v)):
            rows = quantize(name, torch.cat(rows))
            read += rows.values.split([len(s) for s in slots])
            codes, scales, padding = (
                torch.full((sum(used) + 3, rows.codes.shape[1], *shape), fill, dtype=torch.uint8)
                for shape in (
                    (page, rows.codes.shape[-1]),
                    (page, *rows.scales.shape[2:]),
                    (padding_nbytes(name, rows.values.shape[-1], page),),
                )
            )
            where = torch.cat(slots)
            codes[where // page, :, where % page] = rows.codes
            scales[where // page, :, where % page] = rows.scales
            packed.append(head_block(name, operand, codes, scales, padding))
            blocks.append(find_recipe(recipe).block(Operand(operand), rows.values.shape[-1], page))
        self.cache = ref.PagedCache(*packed, *blocks)

    def extend(self, q, seq_lens, q_lens, **params):
        return ref.extend(q, self.cache, self.page_table, seq_lens, q_lens, **params)


def make_tokens(seq_lens, kv_heads, dim, seed):
    return list(randn(sum(seq_lens), kv_heads, dim, seed=seed).split(seq_lens))


def expected_batch(q, q_lens, keys, values, **params):
    parts = zip(q.split(q_lens), keys, values, strict=True)
    return torch.cat([expected_attention(*part, **params) for part in parts])


def assert_close(actual, expected):
    assert actual.dtype == torch.float32 and expected.isfinite().all()
    torch.testing.assert_close(actual.double(), expected, **CLOSE)


# ---- the arithmetic ---------------------------------------------------------------------------------

HEADS = ((9, 3), (24, 4), (28, 4), (4, 1), (64, 8), (7, 1), (1, 1))
FEATURES = {
    "plain": {},
    "own token only": {"window_left": 0},
    "window 1": {"window_left": 1},
    "window 127": {"window_left": 127},
    "window beyond the start": {"window_left": 1000},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": "mixed"},
    "all": {"scale": 0.3, "window_left": 40, "softcap": 5.0, "sinks": "mixed"},
}


def make_params(features, heads, dim):
    params = {"scale": dim**-0.5, **features}
    if "sinks" in params:  # every kind of sink on some head: none, negligible, ordinary, overwhelming
        params["sinks"] = torch.tensor([1.0, -math.inf, 3.0, -2.0, 60.0, 0.0]).repeat(heads)[:heads]
    return params


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_attention(heads, kv_heads, features):
    params = make_params(FEATURES[features], heads, 64)
    for num_queries, num_keys in ((1, 1), (1, 150), (6, 6), (5, 141)):
        q, k = randn(num_queries, heads, 64), randn(num_keys, kv_heads, 64, seed=1)
        v = randn(num_keys, kv_heads, 64, seed=2)
        assert_close(ref.attention(q, k, v, **params), expected_attention(q, k, v, **params))


@pytest.mark.parametrize("window_left", (-1, 0, 1, 2, 127))
def test_what_a_query_sees(window_left):
    """With scores of 0 and unit vectors as values, the output is the mask: equal weights on what is visible."""
    num_queries, num_keys = 20, 150
    out = ref.attention(
        torch.zeros(num_queries, 1, 32),
        randn(num_keys, 1, 32),
        torch.eye(num_keys)[:, None],
        scale=1.0,
        window_left=window_left,
    )
    for i, weights in enumerate(out[:, 0]):
        own = num_keys - num_queries + i
        earlier = own if window_left < 0 else min(own, window_left)
        expected = torch.zeros(num_keys)
        expected[own - earlier : own + 1] = 1 / (earlier + 1)
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)


def test_sinks():
    """-inf is no sink at all; one as large as all scores together takes half; a huge one takes everything."""
    q, k, v = randn(3, 4, 64), randn(9, 2, 64, seed=1), randn(9, 2, 64, seed=2)
    plain = ref.attention(q, k, v, scale=0.2)
    assert torch.equal(ref.attention(q, k, v, scale=0.2, sinks=torch.full((4,), -math.inf)), plain)
    assert not ref.attention(q, k, v, scale=0.2, sinks=torch.full((4,), 1e4)).any()
    half = ref.attention(torch.zeros(1, 4, 64), k, v, scale=0.2, sinks=torch.full((4,), math.log(9)))
    torch.testing.assert_close(half, v.mean(0, keepdim=True).repeat_interleave(2, 1) / 2, rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow():
    """The softmax subtracts the row's maximum; soft-cap bounds what comes before it, and both signs alike."""
    q, k, v = 100 * randn(2, 2, 64), 100 * randn(8, 1, 64, seed=1), randn(8, 1, 64, seed=2)
    for softcap in (0.0, 30.0):
        assert_close(
            ref.attention(q, k, v, scale=1.0, softcap=softcap), expected_attention(q, k, v, scale=1.0, softcap=softcap)
        )


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_precision_is_computed_on_in_float32(dtype):
    q, k, v = (randn(9, heads, 64, seed=heads).to(dtype) for heads in (4, 2, 2))
    out = ref.first_chunk(q, k, v, [4, 5], scale=0.125)
    assert out.dtype == torch.float32
    assert torch.equal(out, ref.first_chunk(q.float(), k.float(), v.float(), [4, 5], scale=0.125))


# ---- packed pages -----------------------------------------------------------------------------------


def border_lens(page):
    return [1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 5]


@pytest.mark.parametrize("features", ("plain", "all"))
@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_ragged_batches_over_pages(recipe, page, features):
    """Decode, extend with prefixes, and whole prompts, around the borders of pages, all in one batch each."""
    heads, kv_heads, dim, seq_lens = 6, 2, 64, border_lens(page)
    keys, values = (make_tokens(seq_lens, kv_heads, dim, seed) for seed in (1, 2))
    pool = Pool(recipe, page, keys, values)
    params = make_params(FEATURES[features], heads, dim)
    for q_lens in (
        [1] * len(seq_lens),
        [min(n, 1 + 3 * i) for i, n in enumerate(seq_lens)],
        [n if i % 2 else 1 for i, n in enumerate(seq_lens)],
    ):
        q = randn(sum(q_lens), heads, dim)
        out = pool.extend(q, seq_lens, q_lens, **params)
        assert_close(out, expected_batch(q, q_lens, pool.k, pool.v, **params))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dims", [(dim, dim) for dim in HEAD_DIMS] + [(192, 128), (64, 96)], ids=str)
def test_head_dims(dims, recipe):
    """Every head dim, K and V alike and not, in decode at every page size."""
    dim, v_dim = dims
    for page, (heads, kv_heads) in zip(PAGE_SIZES, ((4, 4), (9, 3), (7, 1))):
        seq_lens = [page + 3, 2]
        keys, values = make_tokens(seq_lens, kv_heads, dim, 1), make_tokens(seq_lens, kv_heads, v_dim, 2)
        pool = Pool(recipe, page, keys, values)
        q = randn(2, heads, dim)
        out = ref.decode(q, pool.cache, pool.page_table, seq_lens, scale=dim**-0.5)
        assert out.shape == (2, heads, v_dim)
        assert_close(out, expected_batch(q, [1, 1], pool.k, pool.v, scale=dim**-0.5))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_each_query_head_reads_its_kv_head(heads, kv_heads, recipe):
    """The V of head h is 2**h, which every format holds up to a rounding; averages of it are itself."""
    powers = 2.0 ** torch.arange(kv_heads)
    keys, values = make_tokens([70], kv_heads, 64, 1), [powers[None, :, None].expand(70, -1, 64).contiguous()]
    pool = Pool(recipe, 64, keys, values)
    out = pool.extend(randn(3, heads, 64), [70], [3], scale=0.125)
    expected = torch.tensor([2.0 ** (h * kv_heads // heads) for h in range(heads)])
    torch.testing.assert_close(out, expected[None, :, None].expand_as(out), rtol=1e-6, atol=0)


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dead_bytes_and_the_order_of_pages_do_not_matter(recipe, page):
    """Other slots, padding, foreign pages and the dummy page 0 hold NaN in one pool and zeros in the other."""
    seq_lens, q_lens = border_lens(page), [1, 2, 3, 4, 1, 2, 3, 5]
    keys, values = (make_tokens(seq_lens, 2, 96, seed) for seed in (1, 2))
    q = randn(sum(q_lens), 4, 96)
    for params in ({}, {"window_left": page, "softcap": 10.0}):
        outs = [
            Pool(recipe, page, keys, values, fill, seed).extend(q, seq_lens, q_lens, scale=0.1, **params)
            for fill, seed in ((0, 0), (0xFF, 0), (0xFF, 1))
        ]
        assert outs[0].isfinite().all()
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("operand", "kv")
@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_reaches_only_those_who_see_its_token(recipe, operand):
    """Not earlier queries, not later ones whose window has passed, not other heads and not other requests."""
    bad, head, window, q_lens, seq_lens = 60, 1, 4, [20, 3], [70, 33]
    clean = {op: make_tokens(seq_lens, 2, 64, seed) for op, seed in (("k", 1), ("v", 2))}
    spoilt = {op: [x.clone() for x in rows] for op, rows in clean.items()}
    spoilt[operand][0][bad, head, 40] = math.nan
    q = randn(23, 4, 64)
    for window_left in (-1, window):
        run = {"seq_lens": seq_lens, "q_lens": q_lens, "scale": 0.125, "window_left": window_left}
        before = Pool(recipe, 32, clean["k"], clean["v"]).extend(q, **run)
        after = Pool(recipe, 32, spoilt["k"], spoilt["v"]).extend(q, **run)
        last = 69 if window_left < 0 else bad + window
        sees = torch.zeros(23, 4, dtype=torch.bool)
        sees[bad - 50 : last + 1 - 50, 2:] = True  # query i of the first request stands at 50 + i
        assert before.isfinite().all()
        assert after[sees].isnan().any(-1).all()
        assert torch.equal(after[~sees], before[~sees])


# ---- phases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", FEATURES)
def test_first_chunk(features):
    """Each request attends to itself alone, whatever stands beside it."""
    q_lens = [1, 31, 64, 5]
    q, k, v = (randn(sum(q_lens), heads, 64, seed=heads) for heads in (6, 3, 2))
    k = k[:, :2]
    params = make_params(FEATURES[features], 6, 64)
    out = ref.first_chunk(q, k, v, q_lens, **params)
    assert_close(out, expected_batch(q, q_lens, k.split(q_lens), v.split(q_lens), **params))


@pytest.mark.parametrize("recipe", RECIPES)
def test_phases_agree(recipe):
    """A whole prompt from pages is a first chunk of what the pages read back as; a query's phase does not matter."""
    q_lens = [40, 65]
    keys, values = (make_tokens(q_lens, 2, 64, seed) for seed in (1, 2))
    q = randn(sum(q_lens), 4, 64)
    pool = Pool(recipe, 32, keys, values)
    whole = pool.extend(q, q_lens, q_lens, scale=0.125)
    first = ref.first_chunk(q, torch.cat(pool.k), torch.cat(pool.v), q_lens, scale=0.125)
    torch.testing.assert_close(whole, first, rtol=1e-6, atol=1e-6)

    ends = torch.tensor(list(itertools.accumulate(q_lens)))
    last = ref.decode(q[ends - 1], pool.cache, pool.page_table, q_lens, scale=0.125)
    torch.testing.assert_close(last, whole[ends - 1], rtol=1e-6, atol=1e-6)

    rows = torch.cat((torch.arange(30, 40), torch.arange(40 + 64, 40 + 65)))
    tail = pool.extend(q[rows], q_lens, [10, 1], scale=0.125)
    torch.testing.assert_close(tail, whole[rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_extend_is_close_to_the_first_chunk(recipe):
    """By a bound, not by a run: if scores move by at most d, weights stay within a factor exp(+-2 d)."""
    q, k, v, scale = randn(40, 4, 64), randn(40, 2, 64, seed=1), randn(40, 2, 64, seed=2), 0.02
    pool = Pool(recipe, 32, [k], [v])
    moved = pool.extend(q, [40], [40], scale=scale) - ref.first_chunk(q, k, v, [40], scale=scale)
    k_error, v_error = (
        (x - read).abs().amax(0).repeat_interleave(2, 0) for x, read in ((k, pool.k[0]), (v, pool.v[0]))
    )
    d = scale * (q.abs() * k_error).sum(-1, keepdim=True)
    bound = v_error + torch.expm1(2 * d) * ref.first_chunk(q, k, v.abs(), [40], scale=scale)
    assert moved.any() and (moved.abs() <= bound * (1 + 1e-4)).all()
