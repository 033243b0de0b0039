"""The attention backend over plain, sliding-window and hybrid pools, chunk by chunk, against dense attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_quantkv import reference
from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.formats import RECIPES
from sglang_quantkv.integration.backend import QuantKVAttnBackend
from sglang_quantkv.integration.pool import pool_class

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 64, 32, 20
FULL_LAYER, WINDOW_LAYER, WINDOW_LEFT = 1, 0, 45


def plain_pool(recipe):
    return pool_class(recipe)(
        PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.uint8,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def composite(cls, recipe, **kwargs):
    return cls(
        size=PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.uint8,
        head_num=KV_HEADS,
        head_dim=DIM,
        device="cpu",
        full_attention_layer_ids=[FULL_LAYER],
        **kwargs,
    )


def sliding_window_pool(recipe):
    pool = composite(
        SWAKVPool,
        recipe,
        size_swa=PAGES * PAGE,
        swa_attention_layer_ids=[WINDOW_LAYER],
        token_to_kv_pool_class=pool_class(recipe),
    )
    # Slots of the window pool are other slots: here the pages in reverse.
    pages = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(PAGES, 0, -1)))
    pool.register_mapping((pages[:, None] * PAGE + torch.arange(PAGE)).flatten())
    return pool


def hybrid_pool(recipe):
    return composite(
        HybridLinearKVPool, recipe, mamba_pool=MambaPool.__new__(MambaPool), full_kv_pool_class=pool_class(recipe)
    )


class Harness:
    """A backend with requests whose slots it hands out page by page."""

    def __init__(self, recipe, pool, model=None):
        self.recipe = recipe
        self.req_to_token = torch.zeros(4, PAGE * 10, dtype=torch.int32)
        self.free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).add(1).tolist()
        self.lengths = [0] * 4
        self.history = [[], [], [], []]
        self.backend = QuantKVAttnBackend(
            SimpleNamespace(
                token_to_kv_pool=pool,
                req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
                page_size=PAGE,
                model_config=SimpleNamespace(context_len=PAGE * 10),
                model=model or torch.nn.Identity(),
                kv_cache_dtype_str=recipe.name,
                kv_cache_dtype=torch.uint8,
            )
        )

    def step(self, layer, q_lens: dict[int, int], mode: ForwardMode, share: bool = False):
        """One forward pass of a layer; returns the output and the requests' q, k and v."""
        for request, count in q_lens.items():
            for position in range(self.lengths[request], self.lengths[request] + count):
                if position % PAGE == 0:
                    page = self.free.pop()
                    self.req_to_token[request, position : position + PAGE] = page * PAGE + torch.arange(PAGE)
            self.lengths[request] += count
        tokens = sum(q_lens.values())
        q, k, v = (torch.randn(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        loc = torch.cat([self.req_to_token[r, self.lengths[r] - n : self.lengths[r]] for r, n in q_lens.items()])
        batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=torch.tensor([self.lengths[r] for r in q_lens]),
            extend_seq_lens_cpu=list(q_lens.values()),
            req_pool_indices=torch.tensor(list(q_lens)),
            out_cache_loc=loc.long(),
            out_cache_loc_is_physical=False,
        )
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        if share:
            self.backend.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
            out = forward(q.flatten(1), None, None, layer, batch)
        else:
            out = forward(q.flatten(1), k, v, layer, batch)
        lens = list(q_lens.values())
        for request, k_part, v_part in zip(q_lens, k.split(lens), v.split(lens)):
            self.history[request].append((k_part, v_part))
        return out.unflatten(1, (HEADS, DIM)).split(lens), q.split(lens)

    def expected(self, request: int, q, layer, own_precision: bool):
        """Attention over the request's whole history: read back quantized, or as given for a first chunk."""
        k, v = (torch.cat(parts) for parts in zip(*self.history[request]))
        if not own_precision:
            k, v = reference.fake_quantize(k, self.recipe.k), reference.fake_quantize(v, self.recipe.v)
        return reference.attention(q, k, v, scale=layer.scaling, window_left=layer.sliding_window_size)


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


def make_layer(layer_id: int, window: int = -1, **kwargs) -> RadixAttention:
    return RadixAttention(
        HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, layer_id=layer_id, sliding_window_size=window, **kwargs
    )


@pytest.mark.parametrize(
    "make_pool, layer",
    (
        (plain_pool, make_layer(FULL_LAYER)),
        (plain_pool, make_layer(WINDOW_LAYER, WINDOW_LEFT)),
        (sliding_window_pool, make_layer(FULL_LAYER)),
        (sliding_window_pool, make_layer(WINDOW_LAYER, WINDOW_LEFT)),
        (hybrid_pool, make_layer(FULL_LAYER)),
    ),
    ids=("plain", "plain-window", "swa-full", "swa-window", "hybrid"),
)
def test_chunks_hits_and_decodes_of_a_mixed_batch(recipe, make_pool, layer):
    harness = Harness(recipe, make_pool(recipe))
    passes = (
        ({0: 70, 1: 5}, ForwardMode.EXTEND),
        ({2: 33, 0: 50, 3: 1}, ForwardMode.EXTEND),  # first chunks beside a second one
        ({0: 1, 1: 1, 2: 1, 3: 1}, ForwardMode.DECODE),
        ({3: 1, 1: 60, 0: 1}, ForwardMode.MIXED),
        ({2: 1, 0: 1}, ForwardMode.DECODE),
    )
    for q_lens, mode in passes:
        outs, queries = harness.step(layer, q_lens, mode)
        for request, out, q in zip(q_lens, outs, queries):
            first = len(harness.history[request]) == 1
            torch.testing.assert_close(out, harness.expected(request, q, layer, first), rtol=2e-5, atol=2e-5)


def test_a_layer_that_shares_anothers_cache_reads_all_of_it_from_pages(recipe):
    harness = Harness(recipe, plain_pool(recipe))
    layer = make_layer(FULL_LAYER)
    outs, queries = harness.step(layer, {0: 40}, ForwardMode.EXTEND, share=True)
    torch.testing.assert_close(outs[0], harness.expected(0, queries[0], layer, False), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "make_pool, kwargs, message",
    (
        (plain_pool, {"is_cross_attention": True}, "cross-attention"),
        (plain_pool, {"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        (plain_pool, {"logit_cap": 5.0, "logit_capping_method": "sigmoid"}, "sigmoid"),
        (plain_pool, {"use_irope": True}, "in chunks"),
        (sliding_window_pool, {}, "a window that it does not name"),
    ),
)
def test_attention_that_no_route_computes_is_refused_when_the_model_is_loaded(make_pool, kwargs, message):
    with pytest.raises(UnsupportedConfig, match=message):
        Harness(RECIPES["int8"], make_pool(RECIPES["int8"]), model=make_layer(WINDOW_LAYER, **kwargs))


def test_padded_rows_of_a_decode_batch_disturb_nothing(recipe):
    """SGLang pads a batch with requests of row 0, slot 0 and the fill value as length."""
    layer = make_layer(FULL_LAYER)
    harness, padded = (Harness(recipe, plain_pool(recipe)) for _ in range(2))
    fill = harness.backend.get_cuda_graph_seq_len_fill_value()
    results = []
    for each, padding in ((harness, 0), (padded, 3)):
        torch.manual_seed(11)
        each.step(layer, {1: 40}, ForwardMode.EXTEND)
        each.lengths[1] += 1
        q, k, v = (torch.randn(1, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        rows = [torch.cat((x, torch.full((padding, *x.shape[1:]), torch.nan))) for x in (q, k, v)]
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            seq_lens=torch.tensor([41] + [fill] * padding),
            req_pool_indices=torch.tensor([1] + [0] * padding),
            out_cache_loc=torch.tensor([each.req_to_token[1, 40].item()] + [0] * padding),
            out_cache_loc_is_physical=False,
        )
        each.backend.init_forward_metadata(batch)
        results.append(each.backend.forward_decode(rows[0].flatten(1), *rows[1:], layer, batch)[:1])
    assert torch.equal(*results) and results[0].isfinite().all()
