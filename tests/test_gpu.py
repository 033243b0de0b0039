"""Servers on a GPU: by its kernels, inside graphs, and by the torch routes where they are asked for."""

from __future__ import annotations

import urllib.request

import prompts
import pytest
import torch
from test_routes import fill_requests, make_cache

from sglang_quantkv.formats import RECIPES
from sglang_quantkv.kernels import torch_routes
from sglang_quantkv.kernels.targets import current_target
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


@pytest.fixture
def demo_server(serve):
    """``demo_server(*flags)``: stopped after the test."""
    started = []

    def start(*flags: str):
        started.append(serve(("--demo", *flags)))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def generate_and_hit(server) -> None:
    text = server.client.completions.create(model="demo", prompt=prompts.COUNTING[0], temperature=0, max_tokens=12)
    assert "18, 19, 20" in text.choices[0].text
    ids = list(range(1000, 1300))
    first, hit = server.generate(ids, 20), server.generate(ids, 20)
    assert hit["meta_info"]["cached_tokens"] >= 256 and hit["output_ids"][0] == first["output_ids"][0]


def calls(info: dict, phase: str) -> dict[str, int]:
    return {name: count for name, count in info["calls"].items() if name.startswith(phase)}


@pytest.mark.parametrize("recipe", ("int8", "mxfp4"))
def test_kernels_serve_and_say_so(demo_server, recipe):
    server = demo_server("--kv-cache-dtype", recipe, "--enable-metrics")
    generate_and_hit(server)
    info, target = server.quantkv(), current_target().name
    layers = info["pools"][0]["num_layers"]
    assert info["device"].startswith("cuda") and info["recipe"] == recipe and info["pools"][0]["dtype"] == "uint8"
    assert info["store_does_norm_and_rope"] == f"0-{layers - 1}" and not info["store_after_rope"]
    assert info["fallbacks"] == {} and "cuda_graph_config" not in info["declared"]
    assert set(calls(info, "store")) == {f"store_{recipe}_d64_p64_{target}"}
    # Every decode step is a graph's replay: its calls are those of all layers.
    (decodes,) = calls(info, "decode").items()
    assert decodes[0] == f"decode_{recipe}_d64_p64_{target}" and decodes[1] >= 50 * layers and decodes[1] % layers == 0
    assert sum(calls(info, "extend").values()) == layers
    metrics = urllib.request.urlopen(server.url + "/metrics").read().decode()
    assert f'kernel="{decodes[0]}"' in metrics and "quantkv_fallback_total" in metrics
    print(server.log.read_text().split("sglang_quantkv: ")[1][:1500])


def test_the_torch_routes_serve_where_they_are_asked_for(demo_server):
    server = demo_server("--quantkv-reference")
    generate_and_hit(server)
    info = server.quantkv()
    assert info["fallbacks"]["--quantkv-reference"] == sum(info["calls"].values()) > 0
    assert info["declared"]["cuda_graph_config"].startswith("decode disabled, prefill disabled")


def test_memory_after_start_up_is_what_was_planned(serve, measured):
    """Half of the GPU for weights and pages: nothing beside them may take or leave more than 2% of it."""
    torch.zeros(1, device="cuda")  # this process's own context
    free, total = torch.cuda.mem_get_info()
    server = serve(("--kv-cache-dtype", "int8", "--mem-fraction-static", "0.5"))
    used = free - torch.cuda.mem_get_info()[0]
    info = server.quantkv()
    server.stop()
    pages = info["pool_bytes"] / total
    measured(
        f"int8, --mem-fraction-static 0.5: the server took {used / total:.1%} of the GPU, pages {pages:.1%}, "
        f"workspace {info['workspace_bytes'] / 2**20:.0f} MiB, {info['max_total_num_tokens']:,} tokens"
    )
    assert abs(used / total - 0.5) <= 0.02
