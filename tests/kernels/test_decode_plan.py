"""How decode's work is cut: every position once, equal parts, and a place for every partial result."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machines import Config, Machine, build_ahead, machines

from sglang_quantkv.kernels.build import load

machine_of = pytest.mark.parametrize("machine", machines("emulated_mma"), ids=str)
# A slot of the ring holds one page of 64 tokens, or one of 128, or two of 32.
CONFIGS = {Config("int8", 128, 64): 64, Config("int8", 256, 128): 128, Config("mxfp4", 64, 32): 64}
config_of = pytest.mark.parametrize("config", CONFIGS, ids=str)


@pytest.fixture(scope="module", autouse=True)
def built(request):
    build_ahead(request, "decode")


def planned(config: Config, machine: Machine, lengths, q_len, window_left, segments, workers) -> list[torch.Tensor]:
    """start, first_slot, slots, worker_start, worker_request and partials, as hip/src/decode_plan.h describes them."""
    requests = len(lengths)
    sizes = (requests + 1, requests, requests, workers + 1, workers, 2 * requests * segments)
    workspace = torch.full((sum(sizes) + 1,), -77, dtype=torch.int32, device=machine.device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=machine.device)
    load(config.unit("decode"), machine.target).plan(workspace, seq_lens, q_len, window_left, segments, workers)
    *arrays, after = workspace.cpu().split((*sizes, 1))
    assert after == -77
    return [array.tolist() for array in arrays]


def check_plan(config: Config, machine: Machine, lengths, q_len, window_left, segments, workers) -> None:
    tokens = CONFIGS[config]
    start, first_slot, slots, worker_start, worker_request, partials = planned(
        config, machine, lengths, q_len, window_left, segments, workers
    )
    # Slots that hold a token which some query sees: the first query's window begins first.
    positions = []
    for request, length in enumerate(lengths):
        begin = max(0, length - q_len - window_left) if window_left >= 0 else 0
        seen = range(begin // tokens, math.ceil(length / tokens)) if length else range(0)
        assert start[request] == len(positions)
        if length:
            assert (first_slot[request], slots[request]) == (seen.start, len(seen))
        else:
            assert slots[request] == 0
        positions += [(request, segment) for segment in range(segments) for _ in seen]
    assert start[-1] == len(positions)
    # One contiguous range per worker; no worker idles between two that work.
    busy = min(workers, len(positions))
    bounds = [len(positions) * worker // busy for worker in range(busy + 1)] if busy else [0]
    assert worker_start == bounds + [len(positions)] * (workers + 1 - len(bounds))
    shares = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert not shares or (min(shares) >= 1 and max(shares) - min(shares) <= 1)
    places: dict[tuple[int, int], list[int]] = {}
    for worker, (begin, end) in enumerate(itertools.pairwise(bounds)):
        assert worker_request[worker] == positions[begin][0]
        for request, segment in dict.fromkeys(positions[begin:end]):
            places.setdefault((request, segment), []).append(worker + request * segments + segment)
    used = [place for some in places.values() for place in some]
    assert len(set(used)) == len(used) and all(0 <= place < workers + len(lengths) * segments for place in used)
    for request in range(len(lengths)):
        for segment in range(segments):
            first, count = partials[2 * (request * segments + segment) :][:2]
            assert list(range(first, first + count)) == places.get((request, segment), []) or count == 0
            assert count == len(places.get((request, segment), []))


@machine_of
@config_of
@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(8, 100), st.integers(100, 5000)), min_size=1, max_size=40),
    q_len=st.integers(1, 8),
    window_left=st.one_of(st.just(-1), st.integers(0, 300)),
    segments=st.integers(1, 9),
    workers=st.integers(1, 200),
)
@example(lengths=[8], q_len=1, window_left=-1, segments=1, workers=200)
@example(lengths=[0, 0, 0], q_len=1, window_left=-1, segments=2, workers=16)
@example(lengths=[0, 5000, 0], q_len=1, window_left=10, segments=1, workers=3)
def test_every_position_belongs_to_one_worker(config, machine, lengths, q_len, window_left, segments, workers):
    check_plan(config, machine, lengths, q_len, window_left, segments, workers)


@machine_of
@config_of
@pytest.mark.parametrize("requests", (255, 256, 257, 600, 1500))
def test_more_requests_than_threads(config, machine, requests):
    random = torch.Generator().manual_seed(requests)
    lengths = torch.randint(0, 700, (requests,), generator=random)
    lengths[torch.rand(requests, generator=random) < 0.3] = 0
    check_plan(config, machine, [n if n >= 3 else 0 for n in lengths.tolist()], 3, 200, 4, 528)


@machine_of
@config_of
def test_a_long_pool(config, machine):
    """Positions times workers exceed 31 bits."""
    check_plan(config, machine, [4_000_000, 0, 1_000_000], 1, -1, 8, 1584)
