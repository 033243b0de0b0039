"""The scenarios on real servers: of the demo model at a small size on a CPU, at full size on a GPU, where the
kernels' distance to SGLang's bf16 cache is held to the reference's."""

from __future__ import annotations

import dataclasses
import functools
import os

import models
import pytest
import scenarios
import torch
from test_server import BASELINE, SERVED, SMALL

ON_GPU = torch.cuda.is_available()
SIZES = scenarios.FULL if ON_GPU else scenarios.SMALL
if seconds := os.environ.get("QUANTKV_SCENARIO_SECONDS"):  # where a run may not take as long as the full pool does
    SIZES = dataclasses.replace(SIZES, seconds=float(seconds))

REFERENCE = "--quantkv-reference"
if ON_GPU:
    # Logits in float32, so that what is compared is the cache and not the rounding of the last layer.
    COMMON = ("--chunked-prefill-size", str(SIZES.chunk), "--page-size", "64", "--enable-fp32-lm-head")
    LARGE_POOL, SMALL_POOL = ("--max-total-tokens", "65536"), ("--max-total-tokens", "4096")
    BASELINE = ("--kv-cache-dtype", "auto", *COMMON, *LARGE_POOL)
    SERVED = {name: ("--kv-cache-dtype", name, *COMMON, *LARGE_POOL) for name in SERVED}
    SMALL = {name: ("--kv-cache-dtype", name, *COMMON, *SMALL_POOL) for name in SERVED}

# What a run may differ from the bf16 cache, as the mean over logprobs and as KL: about twice what was measured.
LIMITS = {"int8": (0.2, 4e-3), "mxfp4": (1.2, 0.2)}
# A first chunk in high precision or from pages, a batch that is cut elsewhere: what mxfp4 lets a counting text lose.
TOLERATED = {"int8": 0.0, "mxfp4": 0.1}
# Of the prompts that come six at a time, a chunk's border cuts up to every third, which then reads its beginning packed.
CUT = {"int8": 0.0, "mxfp4": 0.34}
# What two ways to compute the same thing in bf16 differ by, as a mean over logprobs. A cold prompt never reads its
# pages, so it shows just this.
ROUNDING = 0.05 if ON_GPU else 0.02


@pytest.fixture(params=SERVED)
def recipe(request):
    return request.param


@pytest.fixture(scope="session")
def started(serve):
    """All servers start at once, unless they run already."""
    for flags in (*SMALL.values(), *SERVED.values()):
        serve.start(flags)
        if ON_GPU:
            serve.start((*flags, REFERENCE))
    serve.start(BASELINE)
    return serve


@pytest.fixture
def server(started, recipe):
    return started(SERVED[recipe])


@pytest.fixture
def small(started, recipe):
    return started(SMALL[recipe])


def encoder(model, *first: int):
    """Text to token ids of a model folder's tokenizer, behind the tokens ``first``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: [*first, *tokenizer(text).input_ids]


@pytest.fixture(scope="session")
def encode(demo_model):
    return encoder(demo_model)


@pytest.fixture(scope="session")
def traces(started, encode):
    """``traces(flags, small flags)``: a configuration's distributions in every run, taken once."""
    return functools.cache(lambda flags, small: scenarios.logits(started(flags), started(small), encode, SIZES))


# ---- the small pool -------------------------------------------------------------------------------------------


def test_a_full_pool_answers_as_an_idle_one_and_loses_no_page(small, recipe, encode, measured):
    figures = scenarios.full_pool(small, encode, SIZES, tolerated=TOLERATED[recipe])
    measured(f"{recipe}, full pool for {SIZES.seconds:.0f} s: {figures}")


# ---- logits ---------------------------------------------------------------------------------------------------


def test_every_way_to_the_cache_stays_near_the_bf16_cache(recipe, traces, measured):
    ours, theirs = traces(SERVED[recipe], SMALL[recipe]), traces(BASELINE, BASELINE)
    distances = {run: scenarios.distance(ours[run], theirs[run]) for run in ours}
    for run, distance in distances.items():
        measured(f"{recipe} against the bf16 cache, {run}: {distance}")
    mean, kl = LIMITS[recipe]
    for run, distance in distances.items():
        assert distance.steps >= distance.of * 0.5, f"{run}: too few steps follow the same tokens: {distance}"
        assert distance.mean <= mean and distance.kl <= kl, f"{run}: {distance}"
    assert distances["cold"].mean <= ROUNDING, distances["cold"]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="on a CPU the kernels are the reference's routes")
def test_kernels_are_as_near_to_the_bf16_cache_as_the_reference(recipe, traces, measured):
    compare_with_reference(traces, recipe, measured, recipe)


def compare_with_reference(traces, recipe, measured, label):
    """Kernels, reference and SGLang's bf16 cache on one model.

    Nearer to the reference than the reference is to bf16, or within rounding of it: a kernel that read a wrong page,
    scale or head would be as far from the one as from the other.
    """
    kernel = traces(SERVED[recipe], SMALL[recipe])
    reference = traces(SERVED[recipe] + (REFERENCE,), SMALL[recipe] + (REFERENCE,))
    bf16 = traces(BASELINE, BASELINE)
    failures = []
    for run in kernel:
        ours, theirs, between = (
            scenarios.distance(*pair)
            for pair in ((kernel[run], bf16[run]), (reference[run], bf16[run]), (kernel[run], reference[run]))
        )
        measured(f"{label}, {run}: kernel-bf16 {ours}\n    reference-bf16 {theirs}\n    kernel-reference {between}")
        if ours.mean > 1.25 * theirs.mean + ROUNDING or between.mean > max(ROUNDING, theirs.mean):
            failures.append(run)
    assert not failures, f"{label}: see the summary for {', '.join(failures)}"


# ---- greedy text, pages, routes -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def greedy(started, encode):
    return functools.cache(lambda flags: scenarios.greedy(started(flags), encode))


def test_greedy_agreement(greedy, recipe, measured):
    match, exact = scenarios.greedy_agreement(greedy(SERVED[recipe]), greedy(BASELINE))
    measured(f"{recipe} against the bf16 cache, 12 fixed prompts: token match {match:.1%}, sequence exact {exact:.1%}")
    assert match > {"int8": 0.8, "mxfp4": 0.5}[recipe]


def test_every_residue_of_a_prompt_begins_as_it_does_alone(server, recipe, encode, measured):
    figures = scenarios.residues(server, encode, SIZES, tolerated=CUT[recipe])
    measured(f"{recipe}, prompt lengths modulo the page: {figures}")


def test_routes_run_as_often_as_the_work_implies(server, recipe, encode, measured):
    calls = scenarios.routes(server, encode, SIZES)
    measured(f"{recipe}, calls of a cold prompt, its radix hit and a prompt of several chunks: {calls}")


# ---- other models ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ("gemma-3-270m", *models.SHAPES))
def test_logits_of_other_models(name, tmp_path, measured):
    """int8 over Gemma's window and head dim, and over the heads, sinks and hybrids of large models in few layers."""
    from server import Servers

    if name == "gemma-3-270m":
        if reason := models.gemma_missing():
            pytest.skip(reason)
        model = models.gemma_model_path()
        encode = encoder(model, models.GEMMA_BOS)
    else:
        # Of the hybrid every fourth layer has a cache; the others show all they have in two.
        model = models.random_model(name, tmp_path / name, layers=4 if name == "qwen3.5-27b" else 2, vocab_size=49152)
        encode = encoder(model)
    serve = Servers(model, tmp_path)
    sizes = dataclasses.replace(SIZES, decoded=64, batch=16, steps=16)
    try:
        for flags in (SERVED["int8"], SMALL["int8"]):
            serve.start(flags)
            serve.start((*flags, REFERENCE))
        serve.start(BASELINE)
        traces = functools.cache(lambda flags, small: scenarios.logits(serve(flags), serve(small), encode, sizes))
        compare_with_reference(traces, "int8", measured, name)
    finally:
        serve.stop()
