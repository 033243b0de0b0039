"""The attention backend over plain, sliding-window and hybrid pools, chunk by chunk, against dense attention."""

from __future__ import annotations

from itertools import pairwise
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
from sglang_quantkv.integration import backend
from sglang_quantkv.integration.pool import pool_class
from sglang_quantkv.kernels.hip_routes import HipRoutes
from sglang_quantkv.kernels.targets import Target
from sglang_quantkv.kernels.torch_routes import TorchRoutes

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


class PrefixAttention:
    """A dense attention that takes prefixes, as a GPU has one."""

    name, reads_prefix = "dense", True

    def __call__(self, q, k, v, batch, **params):
        q_starts, k_starts = batch.q_starts.tolist(), batch.k_starts.tolist()
        assert len(q) == q_starts[-1] and len(k) == len(v) == k_starts[-1]  # nothing behind the last request
        assert batch.max_q == max(b - a for a, b in pairwise(q_starts))
        assert batch.max_k == max(b - a for a, b in pairwise(k_starts))
        ranges = zip(pairwise(q_starts), pairwise(k_starts))
        parts = [reference.attention(q[a:b], k[c:d], v[c:d], **params) for (a, b), (c, d) in ranges]
        return torch.cat(parts).to(q.dtype)


# What serves in these tests, the dtype it takes, and how far from exact attention over the dequantized cache it may be.
IMPLEMENTATIONS = {
    "torch": (TorchRoutes, torch.float32, 2e-5),
    "kernels": (lambda: HipRoutes(Target("emulated_mma"), None, 0), torch.bfloat16, 3e-2),
    # Prefixes of less than 20 tokens are dequantized.
    "kernels+dense": (lambda: HipRoutes(Target("emulated_mma"), PrefixAttention(), 20), torch.bfloat16, 3e-2),
}


class Harness:
    """A backend with requests whose slots it hands out page by page."""

    def __init__(self, recipe, pool, layer, monkeypatch, implementation="torch"):
        make_routes, self.dtype, self.tolerance = IMPLEMENTATIONS[implementation]
        self.routes = make_routes()
        monkeypatch.setattr(backend, "routes_of", lambda device: self.routes)
        self.recipe, self.layer = recipe, layer
        self.req_to_token = torch.zeros(4, PAGE * 10, dtype=torch.int32)
        self.free = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5)).add(1).tolist()
        self.lengths = [0] * 4
        self.history = [[], [], [], []]
        self.backend = backend.QuantKVAttnBackend(
            SimpleNamespace(
                token_to_kv_pool=pool,
                req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
                page_size=PAGE,
                device="cpu",
                dtype=self.dtype,
                server_args=SimpleNamespace(chunked_prefill_size=128),
                model_config=SimpleNamespace(context_len=PAGE * 10),
                model=torch.nn.ModuleList([layer]),
                kv_cache_dtype_str=recipe.name,
                kv_cache_dtype=torch.uint8,
            )
        )

    def admit(self, q_lens: dict[int, int]) -> torch.Tensor:
        """Gives requests room for new tokens; returns their slots."""
        for request, count in q_lens.items():
            for position in range(self.lengths[request], self.lengths[request] + count):
                if position % PAGE == 0:
                    page = self.free.pop()
                    self.req_to_token[request, position : position + PAGE] = page * PAGE + torch.arange(PAGE)
            self.lengths[request] += count
        slots = [self.req_to_token[r, self.lengths[r] - n : self.lengths[r]] for r, n in q_lens.items()]
        return torch.cat(slots).long()

    def random_qkv(self, tokens: int):
        return (torch.randn(tokens, heads, DIM).to(self.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def step(self, q_lens: dict[int, int], mode: ForwardMode, share: bool = False):
        """One forward pass of the layer; returns the output and the requests' queries."""
        slots = self.admit(q_lens)
        q, k, v = self.random_qkv(len(slots))
        lengths = [self.lengths[r] for r in q_lens]
        batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens_cpu=list(q_lens.values()),
            extend_prefix_lens_cpu=[length - n for length, n in zip(lengths, q_lens.values())],
            req_pool_indices=torch.tensor(list(q_lens)),
            out_cache_loc=slots,
        )
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if mode.is_decode() else self.backend.forward_extend
        if share:
            self.backend.token_to_kv_pool.set_kv_buffer(self.layer, batch.out_cache_loc, k, v)
            out = forward(q.flatten(1), None, None, self.layer, batch)
        else:
            out = forward(q.flatten(1), k, v, self.layer, batch)
        assert out.dtype == self.dtype
        lens = list(q_lens.values())
        self.remember(q_lens, k, v)
        return out.unflatten(1, (HEADS, DIM)).split(lens), q.split(lens)

    def remember(self, q_lens: dict[int, int], k, v) -> None:
        lens = list(q_lens.values())
        for request, k_part, v_part in zip(q_lens, k.split(lens), v.split(lens)):
            self.history[request].append((k_part, v_part))

    def check(self, out, request: int, q, own_precision: bool) -> None:
        """Against attention over the request's whole history: read back quantized, or as given for a first chunk."""
        k, v = (torch.cat(parts) for parts in zip(*self.history[request]))
        if not own_precision:
            k, v = reference.fake_quantize(k, self.recipe.k), reference.fake_quantize(v, self.recipe.v)
        layer = self.layer
        expected = reference.attention(q, k, v, scale=layer.scaling, window_left=layer.sliding_window_size)
        torch.testing.assert_close(out.float(), expected, rtol=self.tolerance, atol=self.tolerance)


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


def served(*implementations: str):
    """Every recipe with torch, two with kernels, whose own tests have all."""
    pairs = [(recipe, name) for name in implementations for recipe in RECIPES.values()]
    pairs = [(recipe, name) for recipe, name in pairs if name == "torch" or recipe.name in ("int8", "mxfp4")]
    return pytest.mark.parametrize("recipe, implementation", pairs, ids=[f"{r.name}-{name}" for r, name in pairs])


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
@served(*IMPLEMENTATIONS)
def test_chunks_hits_and_decodes_of_a_mixed_batch(recipe, make_pool, layer, implementation, monkeypatch):
    harness = Harness(recipe, make_pool(recipe), layer, monkeypatch, implementation)
    passes = (
        ({0: 70, 1: 5}, ForwardMode.EXTEND),
        ({2: 33, 0: 50, 3: 1}, ForwardMode.EXTEND),  # first chunks beside a second one
        ({0: 1, 1: 1, 2: 1, 3: 1}, ForwardMode.DECODE),
        ({3: 1, 1: 60, 2: 2, 0: 1}, ForwardMode.MIXED),  # one token of two requests; prefixes of 6 and 34
        ({2: 1, 0: 1}, ForwardMode.DECODE),
    )
    for q_lens, mode in passes:
        outs, queries = harness.step(q_lens, mode)
        for request, out, q in zip(q_lens, outs, queries):
            harness.check(out, request, q, own_precision=len(harness.history[request]) == 1)
    calls = {(desc.phase, desc.implementation): count for desc, count in harness.routes.calls.items()}
    target, dense = {"torch": ("torch", "torch"), "kernels": ("emulated_mma", "torch")}.get(
        implementation, ("emulated_mma", "dense")
    )
    expected = {("store", target): 5, ("first_chunk", dense): 2, ("extend", target): 2, ("decode", target): 3}
    if implementation == "kernels+dense":
        expected["extend", "dequantize+dense"] = 1
    assert calls == expected


def test_a_layer_that_shares_anothers_cache_reads_all_of_it_from_pages(recipe, monkeypatch):
    harness = Harness(recipe, plain_pool(recipe), make_layer(FULL_LAYER), monkeypatch)
    outs, queries = harness.step({0: 40}, ForwardMode.EXTEND, share=True)
    harness.check(outs[0], 0, queries[0], own_precision=False)


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
def test_attention_that_no_route_computes_is_refused_when_the_model_is_loaded(make_pool, kwargs, message, monkeypatch):
    with pytest.raises(UnsupportedConfig, match=message):
        Harness(RECIPES["int8"], make_pool(RECIPES["int8"]), make_layer(WINDOW_LAYER, **kwargs), monkeypatch)


# ---- decode steps in graphs ----------------------------------------------------------------------------


class Graph:
    """A decode step as SGLang captures and replays it: static tensors, whose padded rows are row 0 and slot 0."""

    def __init__(self, harness: Harness, size: int):
        self.harness, self.backend, self.size = harness, harness.backend, size
        self.fill = self.backend.get_cuda_graph_seq_len_fill_value()
        self.static = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            seq_lens=torch.full((size,), self.fill),
            seq_lens_cpu=None,
            req_pool_indices=torch.zeros(size, dtype=torch.int64),
            out_cache_loc=torch.zeros(size, dtype=torch.int64),
        )
        self.qkv = tuple(torch.zeros(size, heads, DIM, dtype=harness.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.backend.init_forward_metadata_out_graph(self.static, in_capture=True)
        self.run()  # as warm-up, and as what is captured
        self.run()

    def run(self) -> torch.Tensor:
        """What is captured."""
        self.backend.init_forward_metadata_in_graph(self.static)
        q, k, v = self.qkv
        return self.backend.forward_decode(q.flatten(1), k, v, self.harness.layer, self.static).unflatten(
            1, (HEADS, DIM)
        )

    def replay(self, requests: list[int], slots, q, k, v) -> torch.Tensor:
        real, static = len(requests), self.static
        static.seq_lens.fill_(self.fill)
        static.seq_lens[:real] = torch.tensor([self.harness.lengths[r] for r in requests])
        for tensor, values in ((static.req_pool_indices, torch.tensor(requests)), (static.out_cache_loc, slots)):
            tensor.zero_()
            tensor[:real] = values
        for tensor, values in zip(self.qkv, (q, k, v)):
            tensor.fill_(torch.nan)
            tensor[:real] = values
        self.backend.init_forward_metadata_out_graph(SimpleNamespace(batch_size=self.size))
        return self.run()


@pytest.mark.parametrize("make_pool", (plain_pool, sliding_window_pool))
@served("torch", "kernels")
def test_a_replayed_step_is_the_eager_one_and_its_padding_is_zeros(recipe, make_pool, implementation, monkeypatch):
    """Graphs of two sizes in turns, at other lengths than captured, with rows of NaN that pad the batch."""
    layer = make_layer(WINDOW_LAYER, WINDOW_LEFT)
    eager, replayed = (Harness(recipe, make_pool(recipe), layer, monkeypatch, implementation) for _ in range(2))
    replayed.backend.init_cuda_graph_state(4, 4)
    graphs = {size: Graph(replayed, size) for size in (4, 2)}
    held = replayed.backend.workspace_nbytes
    assert not replayed.routes.calls
    for harness in (eager, replayed):
        torch.manual_seed(3)
        harness.step({0: 40, 1: 1, 2: 100, 3: 7}, ForwardMode.EXTEND)
    steps = (([0, 2], 2), ([3, 1, 0], 4), ([1], 2), ([2, 3, 1, 0], 4))
    for step, (requests, size) in enumerate(steps):
        torch.manual_seed(step)
        outs, _ = eager.step(dict.fromkeys(requests, 1), ForwardMode.DECODE)
        torch.manual_seed(step)
        slots = replayed.admit(dict.fromkeys(requests, 1))
        got = graphs[size].replay(requests, slots, *replayed.random_qkv(len(requests)))
        assert torch.equal(got[: len(requests)], torch.cat(outs))
        assert torch.equal(got[len(requests) :], torch.zeros_like(got[len(requests) :]))
    calls = {desc.phase: count for desc, count in replayed.routes.calls.items()}
    assert calls == {"first_chunk": 1, "store": 1 + len(steps), "decode": len(steps)}
    assert replayed.backend.workspace_nbytes == held > 0
