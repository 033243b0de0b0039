"""Where a model's attention layers call: norm and rotary embedding move into the store where their code allows it.

Models normalize and rotate Q and K in kernels of their own and then call attention. For the classes below, whose
forward is projection, norm, rotary embedding, attention, projection, the steps between the projections are left to the
attention backend, whose store does them on its way: one launch in place of three or four. Other layers hand over Q and
K that are rotated, and the store only quantizes and writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType

import torch
from sglang.srt.layers.layernorm import Gemma3RMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import Tensor, nn

from sglang_quantkv.kernels.routes import NormRope
from sglang_quantkv.kernels.store import ROTARY_DIM_STEP

_MODELS = "sglang.srt.models."
PLAIN = frozenset(
    _MODELS + name
    for name in (
        "llama.LlamaAttention",
        "qwen2.Qwen2Attention",
        "qwen3.Qwen3Attention",
        "qwen2_moe.Qwen2MoeAttention",
        "qwen3_moe.Qwen3MoeAttention",
    )
)
GEMMA3 = _MODELS + "gemma3_causal.Gemma3Attention"


@dataclass(frozen=True)
class LayerNormRope:
    """What a layer does to Q and K, its tables looked up at every call: SGLang may lengthen them."""

    cos_sin: Callable[[], Tensor]
    interleaved: bool
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __call__(self) -> NormRope:
        if self.q_norm is None:
            return NormRope(self.cos_sin(), self.interleaved)
        gemma = isinstance(self.q_norm, Gemma3RMSNorm)
        return NormRope(
            self.cos_sin(), self.interleaved, self.q_norm.weight, self.k_norm.weight, float(gemma), _eps(self.q_norm)
        )


def take_over(model: nn.Module, dtype: torch.dtype) -> dict[int, LayerNormRope]:
    """Makes attention layers leave norm and rotary embedding to the backend.

    Returns:
        by layer id, what the backend has to do for them; layers that are not in it do it themselves.
    """
    taken = {}
    gemma3_table = _gemma3_tables(model)
    for module in model.modules():
        if (steps := _steps(module, gemma3_table)) and _fits(module, steps, dtype):
            module.forward = MethodType(_forward, module)
            taken[module.attn.layer_id] = steps
    return taken


def _forward(self, positions, hidden_states, forward_batch, **_):
    """What is left of a layer's forward. The positions that it is given are those of the batch, where the backend
    finds them; the rotary embeddings that Gemma passes along are computed again from them."""
    if not len(hidden_states):
        return hidden_states
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    out = self.attn(q, k, v, forward_batch)
    return self.o_proj(out.reshape(-1, self.q_size))[0]


def _steps(module: nn.Module, gemma3_table: Callable[[nn.Module], Tensor | None]) -> LayerNormRope | None:
    """What a layer does between its projections; None if it is of no class that we know."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    norms = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if name in PLAIN and _is_plain(rope := module.rotary_emb):
        return LayerNormRope(lambda: rope.cos_sin_cache_as(torch.float32), not rope.is_neox_style, *norms)
    if name == GEMMA3 and (table := gemma3_table(module)) is not None:
        return LayerNormRope(lambda: table, False, *norms)
    return None


def _is_plain(rope: nn.Module) -> bool:
    """Whether an embedding only looks up its table by position, as its base class does."""
    methods = ("forward", "forward_native", "forward_cuda", "forward_hip")
    return isinstance(rope, RotaryEmbedding) and all(
        getattr(type(rope), name, None) is getattr(RotaryEmbedding, name, None) for name in methods
    )


def _gemma3_tables(model: nn.Module) -> Callable[[nn.Module], Tensor | None]:
    """For an attention layer of Gemma 3, float32 ``[positions, D]``: cosines, then sines, that the model's embedding of
    that kind of layer computes at every step. Layers of a kind share one."""
    owner = next((module for module in model.modules() if hasattr(module, "rotary_emb_local")), None)

    @functools.cache
    def table(is_sliding: bool, positions: int) -> Tensor | None:
        rope = owner.rotary_emb_local if is_sliding else owner.rotary_emb
        if "dynamic" in rope.rope_type:
            return None
        steps = torch.arange(positions, device=rope.inv_freq.device, dtype=torch.float32)
        angles = steps[:, None] * rope.inv_freq.float()
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_scaling

    return lambda layer: None if owner is None else table(layer.is_sliding, len(layer.rotary_emb.cos_sin_cache))


def _fits(module: nn.Module, steps: LayerNormRope, dtype: torch.dtype) -> bool:
    """Whether the store computes these steps."""
    attention, rotary_dim = module.attn, steps.cos_sin().shape[-1]
    norms = [norm for norm in (steps.q_norm, steps.k_norm) if norm is not None]
    return (
        len(norms) in (0, 2)
        and all(type(norm) in (RMSNorm, Gemma3RMSNorm) and norm.weight.dtype == dtype for norm in norms)
        and len({_eps(norm) for norm in norms}) <= 1
        and attention.qk_head_dim == attention.v_head_dim
        and rotary_dim % ROTARY_DIM_STEP == 0
        and rotary_dim <= attention.qk_head_dim
    )


def _eps(norm: nn.Module) -> float:
    return norm.eps if isinstance(norm, Gemma3RMSNorm) else norm.variance_epsilon
