"""reference.py's norm, rotary embedding and store: against float64 formulas, and against the parts they are made of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import one_thread, randn  # noqa: F401

from sglang_quantkv import reference as ref
from sglang_quantkv.formats import RECIPES

DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_rms_norm(head_dim, dtype):
    x, weight = randn(50, 3, head_dim).mul(3).to(dtype), randn(head_dim, seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = ref.rms_norm(x, weight, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert (got == exact.to(dtype)).float().mean() > 0.99


def test_rms_norm_sums_in_the_stated_order():
    """Values whose sum of squares depends on the order, in NumPy's float32."""
    x = randn(20, 256) * 2.0 ** (randn(20, 256, seed=1) * 3).round()
    squares = (x.numpy() * x.numpy()).reshape(20, 32, 8)
    total = squares[..., 0].copy()
    for i in range(1, 8):
        total += squares[..., i]
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    factor = np.float32(1) / np.sqrt(total / np.float32(256) + np.float32(1e-6))
    assert np.array_equal(ref.rms_norm(x, torch.ones(256), 1e-6).numpy(), x.numpy() * factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("rotary_dim", (16, 64, 128))
def test_rotate_multiplies_complex_numbers(rotary_dim, interleaved, dtype):
    x, positions = randn(7, 2, 128).to(dtype), torch.tensor([0, 1, 2, 9, 9, 30, 4])
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(31).double()[:, None] * frequencies
    got = ref.rotate(x, positions, torch.cat((angles.cos(), angles.sin()), -1).float(), interleaved=interleaved)
    pairs = x[..., :rotary_dim].double()
    pairs = pairs.unflatten(-1, (-1, 2)) if interleaved else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = (
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    )
    expected = torch.view_as_real(turned)
    expected = expected.flatten(-2) if interleaved else expected.transpose(-1, -2).flatten(-2)
    assert got.dtype == dtype and torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(got[..., :rotary_dim].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_store_is_its_parts(recipe):
    k_block, v_block = (recipe.block(operand, 64, 32) for operand in "kv")
    caches = [
        ref.PagedCache(
            *(torch.full((3, 2, b.nbytes), 0xA5, dtype=torch.uint8) for b in (k_block, v_block)), k_block, v_block
        )
        for _ in range(2)
    ]
    k, v, q = (randn(5, heads, 64, seed=heads).bfloat16() for heads in (2, 2, 4))
    k_weight, positions, cos_sin = randn(64), torch.arange(5), randn(8, 32)
    slots = torch.tensor([33, -1, 90, 34, -7])
    options = {"positions": positions, "cos_sin": cos_sin}
    q_out, k_out = ref.store(caches[0], slots, k, v, q, k_weight=k_weight, eps=1e-3, **options)
    assert torch.equal(q_out, ref.rotate(q, positions, cos_sin))

    k = ref.rotate(ref.rms_norm(k, k_weight, 1e-3), positions, cos_sin)
    assert torch.equal(k_out, k)
    kept = [0, 2, 3]
    ref.write_rows(caches[1].k_records, k_block, slots[kept], ref.encode(k[kept], recipe.k))
    ref.write_rows(caches[1].v_records, v_block, slots[kept], ref.encode(v[kept], recipe.v))
    assert torch.equal(caches[0].k_records, caches[1].k_records)
    assert torch.equal(caches[0].v_records, caches[1].v_records)
    q_out, k_out = ref.store(caches[0], slots, k, v)
    assert q_out is None and torch.equal(k_out, k)
