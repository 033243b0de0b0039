"""Real servers and a real OpenAI client, on the CPU."""

from __future__ import annotations

import functools
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import prompts
import pytest
import torch

from sglang_quantkv import reference
from sglang_quantkv.formats import RECIPES

POOL = ("--max-total-tokens", "8192", "--enable-cache-report")
# Both recipes, two page sizes, the overlap schedule on and off; chunks of 128 tokens, so that prompts need several.
SERVED = {
    "int8": ("--kv-cache-dtype", "int8", "--page-size", "64", "--chunked-prefill-size", "128", *POOL),
    "mxfp4": (
        *("--kv-cache-dtype", "mxfp4", "--page-size", "32", "--chunked-prefill-size", "128", *POOL),
        "--disable-overlap-schedule",
    ),
}
# float32, the third page size, and a pool of five pages that three requests overflow.
SMALL = {
    name: ("--kv-cache-dtype", name, "--dtype", "float32", "--page-size", "128", "--max-total-tokens", "640")
    for name in SERVED
}
BASELINE = ("--kv-cache-dtype", "auto", "--attention-backend", "torch_native", "--page-size", "64", *POOL)
DEMO = ("--demo",)  # int8 in eight times as many pages
# The kernels, on the emulation of a GPU's threads: half a second a token.
EMULATED = (
    *("SGLANG_QUANTKV_TARGET=emulated_mma", "--kv-cache-dtype", "int8", "--page-size", "32", "--enable-metrics"),
    *("--chunked-prefill-size", "128", "--max-total-tokens", "1024"),
)
STARTED_FIRST = (*SMALL.values(), *SERVED.values())


@pytest.fixture(params=SERVED)
def recipe(request):
    return request.param


@pytest.fixture
def server(serve, recipe, others):
    return serve(SERVED[recipe])


@pytest.fixture
def small(serve, recipe):
    return serve(SMALL[recipe])


@pytest.fixture(scope="session")
def others(serve):
    """The servers of the last tests, started where the small ones are no longer needed."""
    for flags in SMALL.values():
        serve.start(flags).stop()
    for flags in (BASELINE, DEMO, EMULATED):
        serve.start(flags)


@pytest.fixture(scope="session")
def tokenizer(demo_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


def chat(client: openai.OpenAI, text: str, **kwargs):
    return client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": text}], temperature=0, **kwargs
    )


def random_ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40000) for _ in range(length)]


# ---- small pool, float32 -------------------------------------------------------------------------------


def test_retracted_requests_finish_with_the_text_they_have_alone(small, tokenizer):
    """Three requests that grow past the pool together: the scheduler must take one back and run it again later.

    Prompts are shorter than a page, so a request that runs again starts cold, as it does alone; its first
    chunk then also covers the tokens that it had generated, in high precision instead of from packed pages.
    """
    asked = prompts.long_counting_ids(tokenizer)
    assert all(100 <= len(ids) < 125 for ids in asked)
    small.flush_cache()
    alone = [small.generate(ids, 40)["output_ids"] for ids in asked]
    small.flush_cache()
    together = small.generate_together(asked, 40)
    assert sum(r["meta_info"]["num_retractions"] for r in together) > 0
    assert [r["output_ids"] for r in together] == alone


def test_a_request_longer_than_the_pool_is_refused_and_the_server_lives(small):
    prompt = " ".join(["word"] * 3000)
    with pytest.raises(openai.BadRequestError, match="longer than|exceeds|too long|maximum"):
        small.client.completions.create(model="demo", prompt=prompt, max_tokens=10, temperature=0)
    assert len(small.generate([1, 2, 3], 4)["output_ids"]) == 4


def reference_tokens(model, recipe, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers over a cache that ``reference`` quantizes, by the server's rule: the first
    chunk is attended to as it is, everything later reads what the quantized cache gives back."""
    from transformers.cache_utils import Cache, DynamicLayer

    class PackedDynamicLayer(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            is_first_chunk = not self.is_initialized
            k = reference.fake_quantize(key_states, recipe.k).to(key_states.dtype)
            v = reference.fake_quantize(value_states, recipe.v).to(value_states.dtype)
            packed = super().update(k, v, *args, **kwargs)
            return (key_states, value_states) if is_first_chunk else packed

    layers = [PackedDynamicLayer() for _ in range(model.config.num_hidden_layers)]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),  # else every end-of-turn token passes for padding
            past_key_values=Cache(layers=layers),
            max_new_tokens=count,
            do_sample=False,
        )
    return out[0, len(ids) :].tolist()


def test_served_tokens_equal_transformers_over_the_reference_cache(small, recipe, demo_model, tokenizer):
    """Twelve of twelve prompts, fifty tokens each: the integration loses nothing that the recipe does not."""
    from transformers import AutoModelForCausalLM

    asked = prompts.counting_ids(tokenizer)
    assert len(asked) == 12
    small.flush_cache()  # and none is as long as a page, so every prompt is a first chunk
    served = [small.generate(ids, prompts.TOKENS)["output_ids"] for ids in asked]
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    expected = [reference_tokens(model, RECIPES[recipe], ids, prompts.TOKENS) for ids in asked]
    assert prompts.sequence_exact(served, expected) == 1.0


# ---- bfloat16, chunked ---------------------------------------------------------------------------------


def test_chat(server):
    answer = chat(server.client, "What is the capital of France?", max_tokens=40)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_streaming_gives_the_same_text(server):
    question = "List three colours."
    server.flush_cache()  # a prefix hit reads packed pages where a cold prompt does not, so both runs are cold
    whole = chat(server.client, question, max_tokens=30).choices[0].message.content
    server.flush_cache()
    chunks = list(chat(server.client, question, max_tokens=30, stream=True))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole
    assert sum(bool(piece) for piece in pieces) > 3


def test_sixteen_requests_at_once_get_what_each_gets_alone(server, recipe, tokenizer):
    """With text that is no coin toss: a foreign page would change the answer. Together a prompt may be cut by a chunk's
    border and read its beginning from pages, which mxfp4 can show."""
    counting = prompts.counting_ids(tokenizer)
    asked = counting + counting[:4]
    for ids in asked:
        server.generate(ids, 1)  # so that both rounds find the same prefixes cached
    alone = [server.generate(ids, 12)["output_ids"] for ids in asked]
    together = [result["output_ids"] for result in server.generate_together(asked, 12)]
    assert sum(a == b for a, b in zip(alone, together)) >= {"int8": 16, "mxfp4": 14}[recipe]


def test_a_prompt_of_three_and_a_half_chunks_and_its_radix_hit(server, recipe):
    """The first run takes four chunks; the second one finds all whole pages of the prompt cached. All but the
    first chunk read packed pages both times, so greedy text agrees unless the first chunk's precision matters."""
    prompt = random_ids(448, seed=1)
    before = server.quantkv()["calls"]
    cold = server.generate(prompt, 24)
    after = server.quantkv()["calls"]
    hit = server.generate(prompt, 24)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert hit["meta_info"]["cached_tokens"] >= 384
    assert server.generate(prompt, 24)["output_ids"] == hit["output_ids"]
    assert cold["output_ids"][0] == hit["output_ids"][0]
    if (
        recipe == "int8"
    ):  # its pages end where the chunks do, so the hit runs the very chunk that the cold run ended with
        assert hit["meta_info"]["cached_tokens"] == 384
        assert cold["output_ids"] == hit["output_ids"]

    def calls(phase: str) -> int:
        return sum(after.get(k, 0) - before.get(k, 0) for k in after if k.startswith(phase))

    layers = server.quantkv()["pools"][0]["num_layers"]
    assert calls("first_chunk") == layers
    assert calls("extend") == 3 * layers
    # The last of 24 tokens is never written; the overlap schedule runs one step more than it needs.
    assert calls("decode") in (23 * layers, 24 * layers)


def test_the_same_chat_twice_hits_the_cache(server):
    question = "Tell me about the moon. " * 20
    first = chat(server.client, question, max_tokens=5)
    again = chat(server.client, question, max_tokens=5)
    assert first.usage.prompt_tokens == again.usage.prompt_tokens > 100
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


def test_an_abort_leaves_the_others_alone(server):
    prompt = random_ids(20, seed=3)  # less than a page: never a prefix hit
    alone = server.generate(prompt, 40)["output_ids"]
    stream = chat(server.client, "Count to one thousand.", max_tokens=500, stream=True)
    next(iter(stream))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(server.generate, prompt, 40)
        time.sleep(0.5)
        stream.close()
        assert beside.result()["output_ids"] == alone
    time.sleep(1)
    before = server.quantkv()["calls"]
    time.sleep(1)
    assert server.quantkv()["calls"] == before  # nothing is decoding: the aborted request would for half a minute
    assert server.generate(prompt, 40)["output_ids"] == alone


def test_server_info_reads_the_live_pool(server, recipe):
    info = server.quantkv()
    pool = info["pools"][0]
    per_token = RECIPES[recipe].nbytes_per_token(3, 64, page_size=info["page_size"])
    assert info["recipe"] == recipe and info["device"] == "cpu"
    assert pool["dtype"] == "uint8" and pool["tokens"] == 8192
    assert pool["bytes_per_token_per_layer"] == per_token
    assert pool["bytes"] == info["pool_bytes"] == 30 * per_token * (8192 + info["page_size"])
    assert info["kernels"]["decode"] == [f"decode_{recipe}_d64_p{info['page_size']}_torch"]
    assert "attention_backend" in info["declared"] and "page_size" not in info["declared"]
    log = server.log.read_text()
    assert f"sglang_quantkv: {recipe} KV cache, pages of {info['page_size']}" in log
    assert f"bytes per token {30 * per_token:,}" in log


def test_counters_of_server_info_are_live(server):
    before = sum(server.quantkv()["calls"].values())
    server.generate(random_ids(5, seed=4), 3)
    assert sum(server.quantkv()["calls"].values()) > before


# ---- against SGLang's own bf16 cache -------------------------------------------------------------------


@pytest.fixture(scope="session")
def greedy(serve, tokenizer):
    """``greedy(flags)``: a server's tokens for the fixed prompts and for the open questions, each set in one batch."""

    @functools.cache
    def tokens(flags: tuple[str, ...]) -> tuple[list[list[int]], list[list[int]]]:
        server = serve(flags)
        counting = server.generate_together(prompts.counting_ids(tokenizer), prompts.TOKENS)
        open_questions = server.generate_together(prompts.chat_ids(tokenizer), prompts.TOKENS, ignore_eos=False)
        return tuple([result["output_ids"] for result in results] for results in (counting, open_questions))

    return tokens


def test_greedy_text_against_the_bf16_cache(serve, others, recipe, greedy, measured):
    assert "quantkv" not in serve(BASELINE).get("/server_info")
    match, exact = {}, {}
    for name, ours, theirs in zip(("fixed prompts", "open questions"), greedy(SERVED[recipe]), greedy(BASELINE)):
        match[name], exact[name] = prompts.token_match(ours, theirs), prompts.sequence_exact(ours, theirs)
        measured(
            f"{recipe} against SGLang's bf16 cache, 12 {name}, up to 50 tokens: "
            f"token match {match[name]:.1%}, sequence exact {exact[name]:.1%}"
        )
    assert match["fixed prompts"] > {"int8": 0.8, "mxfp4": 0.5}[recipe]


def test_the_bf16_cache_against_itself(serve, others, greedy, tokenizer, measured):
    """How far open questions drift from rounding alone: the same bf16 cache, one request at a time."""
    _, together = greedy(BASELINE)
    alone = [
        serve(BASELINE).generate(ids, prompts.TOKENS, ignore_eos=False)["output_ids"]
        for ids in prompts.chat_ids(tokenizer)
    ]
    match, exact = prompts.token_match(together, alone), prompts.sequence_exact(together, alone)
    measured(f"bf16 in a batch against bf16 alone, 12 open questions: token match {match:.1%}, exact {exact:.1%}")
    assert match > 0.2


def decode_seconds(*servers, context: int, tokens: int = 16) -> list[float]:
    """Seconds per decoded token of each server after a prompt of ``context`` tokens that it has cached: the least of
    three, taken in turns so that what else the machine does meets all of them."""
    prompt = random_ids(context, seed=context)

    def seconds(server, count: int) -> float:
        start = time.perf_counter()
        server.generate(prompt, count)
        return time.perf_counter() - start

    for server in servers:
        server.generate(prompt, 1)
    rounds = [[(seconds(s, tokens + 1) - seconds(s, 1)) / tokens for s in servers] for _ in range(3)]
    return [min(times) for times in zip(*rounds)]


def test_decode_at_2k_keeps_near_torch_native(serve, server, recipe, measured):
    """The same code took 1.1 times its time on one machine and 1.7 times on another with the same number of cores: the
    routes are bound by the conversion of codes, torch_native by its matrix products. The bound is for what grows with
    the pool or is done twice."""
    ours, theirs = decode_seconds(server, serve(BASELINE), context=2048)
    measured(f"{recipe} decode step at 2,048 tokens: {ours * 1e3:.0f} ms, torch_native bf16 {theirs * 1e3:.0f} ms")
    assert ours <= 2.5 * theirs


def test_the_demo_serves_and_its_larger_pool_costs_no_time(serve, others, measured):
    demo = serve(DEMO)
    info = demo.quantkv()
    assert info["recipe"] == "int8" and info["max_total_num_tokens"] == 65536
    assert "Paris" in chat(demo.client, "What is the capital of France?", max_tokens=20).choices[0].message.content
    ours, theirs = decode_seconds(demo, serve(SERVED["int8"]), context=512)
    measured(f"int8 decode step at 512 tokens: pool of 65,536 {ours * 1e3:.0f} ms, of 8,192 {theirs * 1e3:.0f} ms")
    assert ours <= 1.25 * theirs


# ---- the kernels, emulated -----------------------------------------------------------------------------


def test_kernels_serve_what_the_torch_routes_serve(serve, others, tokenizer):
    """Store at the call point, decode and extend as a GPU would run them: the same greedy tokens, from chunks and from
    a radix hit, and every call counted."""
    emulated, torch_server = serve(EMULATED), serve(SERVED["int8"])
    asked = prompts.counting_ids(tokenizer)[:3]
    torch_server.flush_cache()
    got = [result["output_ids"] for result in emulated.generate_together(asked, 6)]
    assert got == [result["output_ids"] for result in torch_server.generate_together(asked, 6)]

    emulated.flush_cache()
    torch_server.flush_cache()
    before = emulated.quantkv()["calls"]
    prompt = prompts.long_counting_ids(tokenizer)[0] * 2
    assert 128 < len(prompt) < 256
    cold, hit = (emulated.generate(prompt, 4) for _ in range(2))
    assert (cold["meta_info"]["cached_tokens"], hit["meta_info"]["cached_tokens"]) == (0, len(prompt) // 32 * 32)
    assert cold["output_ids"] == hit["output_ids"] == torch_server.generate(prompt, 4)["output_ids"]
    info = emulated.quantkv()
    layers = info["pools"][0]["num_layers"]
    calls = {name: count - before.get(name, 0) for name, count in info["calls"].items()}
    assert calls["first_chunk_int8_d64_p32_torch"] == layers  # the first of two chunks
    assert calls["extend_int8_d64_p32_emulated_mma"] == 2 * layers  # the second, and what the hit left over
    assert calls["decode_int8_d64_p32_emulated_mma"] in (6 * layers, 8 * layers)
    assert calls["store_int8_d64_p32_emulated_mma"] == sum(calls.values()) / 2
    assert info["store_does_norm_and_rope"] == f"0-{layers - 1}" and not info["store_after_rope"]
    assert info["fallbacks"] == {} and info["workspace_bytes"] > 0


def test_prometheus_has_the_counters_of_the_kernels(serve, others):
    emulated = serve(EMULATED)
    emulated.generate(random_ids(5, seed=6), 2)
    text = urllib.request.urlopen(emulated.url + "/metrics", timeout=60).read().decode()
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("quantkv_"))

    def value(name: str, *labels: str) -> float:
        (found,) = (v for k, v in series.items() if k.startswith(name + "{") and all(label in k for label in labels))
        return float(found)

    assert value("quantkv_route_calls_total", 'phase="decode"', 'kernel="decode_int8_d64_p32_emulated_mma"') > 0
    assert value("quantkv_fallback_total", 'reason="--quantkv-reference"') == 0
    assert value("quantkv_pool_bytes") == emulated.quantkv()["pool_bytes"]
