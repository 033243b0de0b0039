"""The dense attention kernels that SGLang's installation brings, as the routes take them."""

from __future__ import annotations

import importlib.util

import torch

from sglang_quantkv.errors import UnsupportedConfig
from sglang_quantkv.kernels.dense import DenseAttention, DenseBatch
from sglang_quantkv.kernels.targets import Platform, Target

# ``extend_from`` of each is the default of --quantkv-extend-from beside it: from how many cached tokens on our extend
# kernel is used. On an H200 it took 2.8 (int8) and 4.2 (mxfp4) times FA3's time for a chunk of 4096 tokens behind 8192
# (hip/PERFORMANCE.md), so prefixes are dequantized as long as the workspace for them stays small.


class FlashAttention3:
    """Of sgl_kernel, on Hopper."""

    name = "fa3"
    reads_prefix = True
    extend_from = 32768

    def __init__(self):
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        self._attention = flash_attn_varlen_func

    def __call__(self, q, k, v, batch: DenseBatch, *, scale, window_left, softcap, sinks):
        return self._attention(
            q, k, v, batch.q_starts, batch.k_starts, batch.max_q, batch.max_k, softmax_scale=scale, causal=True,
            window_size=(window_left, 0 if window_left >= 0 else -1), softcap=softcap,
            sinks=None if sinks is None else sinks.bfloat16(),  # it takes no other dtype
        )  # fmt: skip


class Triton:
    """SGLang's own, on any GPU."""

    name = "triton"
    reads_prefix = False
    extend_from = 0

    def __init__(self):
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        self._attention = extend_attention_fwd

    def __call__(self, q, k, v, batch: DenseBatch, *, scale, window_left, softcap, sinks):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        # No prefix: its lengths are zeros, and nothing is looked up.
        none = torch.zeros_like(batch.q_starts)
        self._attention(
            q, k, v, out, k, v, batch.q_starts, none, none.long(), None, True, None, batch.max_q, 1.0, 1.0, scale,
            logit_cap=softcap, sliding_window_size=window_left, sinks=sinks,
        )  # fmt: skip
        return out


class Aiter:
    """AMD's library, where it computes the same thing; else SGLang's Triton."""

    name = "aiter"
    reads_prefix = False
    extend_from = 0

    def __init__(self):
        from aiter import flash_attn_varlen_func

        self._attention, self._other = flash_attn_varlen_func, Triton()

    def __call__(self, q, k, v, batch: DenseBatch, *, scale, window_left, softcap, sinks):
        if softcap or sinks is not None:
            return self._other(q, k, v, batch, scale=scale, window_left=window_left, softcap=softcap, sinks=sinks)
        return self._attention(
            q, k, v, batch.q_starts, batch.k_starts, batch.max_q, batch.max_k, softmax_scale=scale, causal=True,
            window_size=(window_left, 0 if window_left >= 0 else -1),
        )  # fmt: skip


def find_dense(target: Target) -> DenseAttention:
    """The best one that is there.

    Raises:
        UnsupportedConfig: when there is none.
    """
    candidates = [Triton]
    if target.platform == Platform.HIP and importlib.util.find_spec("aiter"):
        candidates.insert(0, Aiter)
    if target.name == "sm_90" and importlib.util.find_spec("sgl_kernel"):
        candidates.insert(0, FlashAttention3)
    reasons = []
    for candidate in candidates:
        try:
            return candidate()
        except ImportError as error:
            reasons.append(f"{candidate.name}: {error}")
    raise UnsupportedConfig(
        f"no attention kernel for first chunks on {target} ({'; '.join(reasons)})",
        "SGLang's installation with sgl_kernel or Triton",
        "Reinstall SGLang with its GPU dependencies",
    )
