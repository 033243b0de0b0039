"""What a GPU must show until it has kernels of its own: the torch routes write the same bytes there, and serve."""

from __future__ import annotations

import prompts
import pytest
import torch
from test_routes import fill_requests, make_cache

from sglang_quantkv.formats import RECIPES
from sglang_quantkv.kernels import torch_routes
from sglang_quantkv.reference import PagedCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(cache: PagedCache) -> PagedCache:
    return PagedCache(cache.k_records.cuda(), cache.v_records.cuda(), cache.k_block, cache.v_block)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
def test_pages_and_attention_are_the_cpus(recipe, head_dim):
    cache = make_cache(recipe, head_dim=head_dim)
    gpu = on_gpu(cache)
    lengths = [1, 33, 300]

    def store(_, slots, k, v):
        torch_routes.store(cache, slots, k, v)
        torch_routes.store(gpu, slots.cuda(), k.cuda(), v.cuda())

    table = fill_requests(cache, lengths, store=store)
    assert torch.equal(gpu.k_records.cpu(), cache.k_records) and torch.equal(gpu.v_records.cpu(), cache.v_records)
    q = torch.randn(171, 6, head_dim)
    params = {"scale": head_dim**-0.5, "window_left": 100, "softcap": 10.0}
    expected = torch_routes.extend(q, cache, table, lengths, [1, 20, 150], **params)
    got = torch_routes.extend(q.cuda(), gpu, table.cuda(), lengths, [1, 20, 150], **params)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", ("int8", "mxfp4"))
def test_the_demo_serves_on_the_gpu(serve, recipe):
    server = serve(("--demo", "--kv-cache-dtype", recipe))
    text = server.client.completions.create(model="demo", prompt=prompts.COUNTING[0], temperature=0, max_tokens=12)
    assert "18, 19, 20" in text.choices[0].text
    ids = list(range(1000, 1300))
    first, hit = server.generate(ids, 20), server.generate(ids, 20)
    assert hit["meta_info"]["cached_tokens"] >= 256 and hit["output_ids"][0] == first["output_ids"][0]
    info = server.quantkv()
    assert info["device"].startswith("cuda") and info["recipe"] == recipe and info["pools"][0]["dtype"] == "uint8"
    assert info["calls"][f"extend_{recipe}_d64_p64_torch"] == info["pools"][0]["num_layers"]
    assert info["declared"]["cuda_graph_config"].startswith("decode disabled, prefill disabled")
    print(server.log.read_text().split("sglang_quantkv: ")[1][:1500])
    server.stop()
