"""Norm and rotary embedding that move into the store: SGLang's own attention layers, before and after."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.test.test_utils import published_topology
from test_routes import make_cache
from transformers import Gemma3TextConfig

from sglang_quantkv import reference
from sglang_quantkv.formats import RECIPES
from sglang_quantkv.integration.call_point import take_over

HIDDEN, HEADS, KV_HEADS, DIM, TOKENS = 128, 4, 2, 64, 40
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def topology():
    with published_topology(device="cpu", page_size=32):
        yield


def llama():
    from sglang.srt.models.llama import LlamaAttention

    config = SimpleNamespace(head_dim=DIM)
    return LlamaAttention(config, HIDDEN, HEADS, KV_HEADS, rope_scaling=SCALED, max_position_embeddings=512)


def llama_partial():
    from sglang.srt.models.llama import LlamaAttention

    config = SimpleNamespace(head_dim=DIM, partial_rotary_factor=0.5)
    return LlamaAttention(config, HIDDEN, HEADS, KV_HEADS, rope_is_neox_style=False)


def qwen2():
    from sglang.srt.models.qwen2 import Qwen2Attention

    return Qwen2Attention(HIDDEN, HEADS, KV_HEADS, head_dim=DIM)


def qwen3():
    from sglang.srt.models.qwen3 import Qwen3Attention

    return Qwen3Attention(HIDDEN, HEADS, KV_HEADS, head_dim=DIM, rms_norm_eps=1e-5)


def qwen2_moe():
    from sglang.srt.models.qwen2_moe import Qwen2MoeAttention

    return Qwen2MoeAttention(HIDDEN, HEADS // 2, KV_HEADS)


def qwen3_moe():
    from sglang.srt.models.qwen3_moe import Qwen3MoeAttention

    config = SimpleNamespace(rope_scaling=None)
    return Qwen3MoeAttention(HIDDEN, HEADS, KV_HEADS, head_dim=DIM, rms_norm_eps=1e-5, config=config)


def gemma3(layer: int):
    from sglang.srt.models.gemma3_causal import Gemma3TextModel

    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = Gemma3TextConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, vocab_size=64,
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, intermediate_size=64,
        sliding_window=32, rope_parameters=ropes, max_position_embeddings=512,
    )  # fmt: skip
    model = torch.nn.Module()
    model.model = Gemma3TextModel(config)
    return model, model.model.layers[layer].self_attn


MODELS = {
    "llama": llama,
    "llama-partial-interleaved": llama_partial,
    "qwen2": qwen2,
    "qwen2-moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3-moe": qwen3_moe,
    "gemma3-window": lambda: gemma3(0),
    "gemma3-full": lambda: gemma3(1),
}


class Projection(torch.nn.Linear):
    """In place of SGLang's last projection, which wants a process group."""

    def forward(self, x):
        return super().forward(x), None


def make(name: str):
    """A model and its attention layer, with weights that a wrong norm or embedding would show."""
    torch.manual_seed(1)
    with torch.device("cpu"):
        made = MODELS[name]()
    model, layer = made if isinstance(made, tuple) else (made, made)
    layer.o_proj = Projection(layer.q_size, HIDDEN)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.3
    return model, layer


def run(model, layer, monkeypatch):
    """What attention is called with when the layer runs: q, k and v."""
    seen = []

    def forward(self, q, k, v, forward_batch, **_):
        seen.extend(t.clone().reshape(TOKENS, -1, self.head_dim) for t in (q, k, v))
        return torch.zeros(TOKENS, self.tp_q_head_num * self.head_dim)

    monkeypatch.setattr(RadixAttention, "forward", forward)
    monkeypatch.setattr("sglang.srt.models.qwen3_moe.enable_fused_set_kv_buffer", lambda batch: False)
    positions, hidden = torch.arange(100, 100 + TOKENS), torch.randn(TOKENS, HIDDEN)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True))
    more = {}
    if hasattr(model, "model"):
        rope = model.model.rotary_emb_local if layer.is_sliding else model.model.rotary_emb
        more["position_embeddings"] = rope(hidden, positions[None])
    out = layer.forward(positions=positions, hidden_states=hidden, forward_batch=batch, **more)
    assert out.shape == (TOKENS, HIDDEN)
    return positions, seen


@pytest.mark.parametrize("name", MODELS)
def test_the_store_does_what_the_layer_did(name, monkeypatch):
    model, layer = make(name)
    torch.manual_seed(2)
    positions, (q, k, v) = run(model, layer, monkeypatch)
    taken = take_over(model, torch.float32)
    torch.manual_seed(2)
    _, (raw_q, raw_k, raw_v) = run(model, layer, monkeypatch)
    assert torch.equal(raw_v, v) and not torch.allclose(raw_q, q) and not torch.allclose(raw_k, k)

    steps = taken[layer.attn.layer_id]()
    got_q, got_k = reference.store(
        make_cache(RECIPES["int8"], heads=raw_k.shape[1], head_dim=raw_k.shape[2]),
        torch.arange(32, 32 + TOKENS), raw_k, raw_v, raw_q, positions=positions, **vars(steps),
    )  # fmt: skip
    torch.testing.assert_close(got_q, q, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got_k, k, rtol=1e-4, atol=1e-4)


def test_layers_of_gemma3_share_a_table_of_each_kind():
    model, _ = make("gemma3-full")
    tables = [steps().cos_sin.data_ptr() for _, steps in sorted(take_over(model, torch.float32).items())]
    assert tables == tables[:2] * 2 and tables[0] != tables[1]


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_the_store_does_not_fit_keep_their_forward(name):
    """Norm weights of another dtype than the rows, or an embedding that does more than look up its table."""
    model, layer = make(name)
    original = layer.forward
    if hasattr(layer, "q_norm"):
        assert take_over(model, torch.bfloat16) == {}
        assert layer.forward == original
    if not hasattr(model, "model"):

        class Special(type(layer.rotary_emb)):
            def forward_native(self, *args, **kwargs):
                raise NotImplementedError

        layer.rotary_emb.__class__ = Special
        assert take_over(model, torch.float32) == {}
        assert layer.forward == original


def test_classes_that_are_not_known_are_left_alone():
    model, layer = make("llama")
    layer.__class__ = type("LlamaAttention", (type(layer),), {})
    assert take_over(model, torch.float32) == {}
