"""What only a GPU shows: its memory's size, captured graphs, batches of the size that servers have."""

from __future__ import annotations

import pytest
import torch
from attention import UNUSED_ENTRY, Call, Case, Problem, check, decode, extend, has_two_terms
from machines import Config, build_ahead, machines
from test_exact import grid_rows, signs

from sglang_quantkv.kernels import decode as decode_route
from sglang_quantkv.reference import PagedCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PHASES = {"decode": decode, "extend": extend}
each_phase = pytest.mark.parametrize("phase", PHASES)
on_gpu = pytest.mark.parametrize("machine", machines(), ids=str)
each_config = pytest.mark.parametrize("config", [Config("int8", 128, 64), Config("mxfp4", 128, 64)], ids=str)


@pytest.fixture(scope="module", autouse=True)
def built(request):
    for phase in PHASES:
        build_ahead(request, phase)


@on_gpu
@each_config
@each_phase
def test_the_mean_of_65536_equal_keys(config, machine, phase):
    length = 65536
    keys, values = signs(1, 1, config.head_dim).expand(length, -1, -1), grid_rows(config, length, 1)
    case = Case((length,), (1,), group=4, dtype=torch.float16)
    got = PHASES[phase](Problem(config, case, keys=[keys], values=[values]), machine)
    expected = values.double().mean(0).expand(4, -1)[None]
    # Half an ulp of fp16; 2^16 terms up to 6 in float32, and as many roundings of their sum.
    torch.testing.assert_close(got.double(), expected, rtol=2**-11, atol=6 * 2**-16)


@on_gpu
@each_config
@each_phase
@pytest.mark.parametrize("gib", (1.9, 2.1, 3.9, 4.1, 5.0))
def test_pages_anywhere_in_a_large_pool(config, machine, phase, gib):
    """The same bits as from a small pool: offsets do not wrap at 2 or at 4 GiB."""
    problem = Problem(config, Case((300, 70), (1, 1), group=4, kv_heads=2))
    small = problem.cache
    start = int(gib * 2**30 / small.k_records[0].numel())
    large = []
    for records in (small.k_records, small.v_records):
        pool = torch.zeros(start + len(records), *records.shape[1:], dtype=torch.uint8, device="cuda")
        pool[start:] = records.cuda()
        large.append(pool)
    expected = PHASES[phase](problem, machine)
    problem.cache = PagedCache(*large, small.k_block, small.v_block)
    problem.page_table = torch.where(problem.page_table == UNUSED_ENTRY, UNUSED_ENTRY, problem.page_table + start)
    assert torch.equal(PHASES[phase](problem, machine), expected)


@on_gpu
@each_config
def test_a_captured_graph_plans_again(config, machine):
    """Plan and decode, captured once, replayed for other lengths and pages in the same tensors."""
    longest = (1500, 900, 64, 1, 333, 2048, 7, 128)
    problem = Problem(config, Case(longest, (1,) * 8, group=4, kv_heads=2))
    call = Call(problem, machine)

    def run():
        plan = decode_route.plan(call.cache, call.seq_lens, problem.case.group)
        decode_route.decode(
            call.cache, call.q, call.page_table, call.seq_lens, plan, scale=call.options["scale"], out=call.out
        )

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in (longest, (1, 1, 1, 1, 1, 1, 1, 1), (2048, 0, 65, 1000, 0, 64, 128, 31), (0,) * 8, longest[::-1]):
        replayed = Problem(config, Case(lengths, (1,) * 8, group=4, kv_heads=2), seed=sum(lengths))
        for pool, records in (
            (call.cache.k_records, replayed.cache.k_records),
            (call.cache.v_records, replayed.cache.v_records),
        ):
            pool[: len(records)] = records.cuda()
        call.page_table.fill_(UNUSED_ENTRY)
        call.page_table[:, : replayed.page_table.shape[1]] = replayed.page_table.cuda()
        call.seq_lens.copy_(torch.tensor(lengths))
        call.q.copy_(torch.cat(replayed.queries))
        graph.replay()
        check(replayed, call.result(), two_terms=True)


@on_gpu
@each_config
@each_phase
def test_64_ragged_requests(config, machine, phase):
    random = torch.Generator().manual_seed(9)
    lengths = torch.randint(1, 6000, (64,), generator=random).tolist()
    for group, kv_heads in ((4, 8), (8, 1)):
        q_lens = [1] * 64 if phase == "decode" else [min(n, 1 + i % 40) for i, n in enumerate(lengths)]
        problem = Problem(config, Case(tuple(lengths), tuple(q_lens), group=group, kv_heads=kv_heads))
        got = PHASES[phase](problem, machine)
        check(problem, got, phase == "decode" and has_two_terms(machine, problem.case.rows))


@on_gpu
@each_config
def test_runs_repeat(config, machine):
    """The same bits each time: no result depends on which wave comes first."""
    problem = Problem(config, Case((3000, 17, 900, 0, 64), (1,) * 5, group=8, kv_heads=4))
    first, *others = (decode(problem, machine) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)
    problem = Problem(config, Case((700, 300), (500, 300), group=4, kv_heads=2))
    first, *others = (extend(problem, machine) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)
