"""What a served packed cache must show, over HTTP alone: the same at a small size on a CPU and at full size on a GPU.

Every scenario takes running servers and ``Sizes``, raises AssertionError for what must never be, and returns
figures for what a caller compares or prints.
"""

from __future__ import annotations

import http.client
import json
import math
import pydoc_data.topics
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import prompts
from server import Server

Encode = Callable[[str], list[int]]  # text to token ids, with BOS where a model wants it


@dataclass(frozen=True)
class Sizes:
    """Tokens, unless said otherwise.

    Attributes:
        chunk: the servers' ``--chunked-prefill-size``.
        cold: a prompt within one chunk; long: one of three and a half.
        hit: how much of the cold prompt its second run must find cached.
        batch: requests at once, of ``steps`` tokens each.
        overflow: requests at once that the small pool does not hold, of ``steps`` + 16 tokens each.
        context, decoded: a prompt, and how much is generated behind it.
        residues: how many lengths modulo the page are tried, spread evenly; 0 for all.
        seconds, workers: of the full pool; a slow machine goes on until enough has happened.
        prefixes, suffixes: texts there, and requests for each; ``answer`` tokens are generated.
    """

    chunk: int
    cold: int
    long: int
    hit: int
    batch: int
    steps: int
    overflow: int
    context: int
    decoded: int
    residues: int
    seconds: float
    workers: int
    prefixes: int
    suffixes: int
    answer: int


SMALL = Sizes(
    chunk=128,
    cold=120,
    long=448,
    hit=64,
    batch=8,
    steps=24,
    overflow=3,
    context=200,
    decoded=24,
    residues=4,
    seconds=10,
    workers=6,
    prefixes=2,
    suffixes=3,
    answer=16,
)
FULL = Sizes(
    chunk=512,
    cold=480,
    long=1792,
    hit=256,
    batch=64,
    steps=48,
    overflow=64,
    context=1500,
    decoded=300,
    residues=0,
    seconds=600,
    workers=48,
    prefixes=6,
    suffixes=8,
    answer=48,
)


def prose(encode: Encode, sizes: Sizes) -> tuple[list[int], list[int]]:
    """A cold prompt and another long one, of English that every Python has: real distributions, few of them certain."""
    topics = pydoc_data.topics.topics
    ids = encode("".join(topics[name] for name in ("import", "class", "with", "exceptions", "strings")))
    text, long_text = ids[: sizes.cold], ids[sizes.cold :][: sizes.long]
    assert len(long_text) == sizes.long, "the prose is too short"
    return text, long_text


def counting(encode: Encode, start: int, length: int) -> list[int]:
    """A text whose continuation is no coin toss (see ``prompts``), cut to a length; starts less than one apart share
    nothing but their first token."""
    return encode(", ".join(map(str, range(start, start + length))))[:length]


# ---- distributions --------------------------------------------------------------------------------------------

TOP = 20  # tokens of a distribution that are asked for


class Trace(NamedTuple):
    """Consecutive tokens of one text, and the distribution (token: logprob) that each was drawn from or forced on."""

    tokens: list[int]
    steps: list[dict[int, float]]
    meta: dict


class Distance(NamedTuple):
    """How far two servers' distributions are apart after the same tokens.

    Attributes:
        steps, of: distributions compared, of how many.
        mean, worst: absolute difference of logprobs over the tokens that either server has in its top. One that the
            other lacks counts with its distance to the least that the other has: a lower bound.
        kl: KL(second || first), a lower bound, too: see ``_kl``.
        same_top: share of steps with the same most likely token.
    """

    steps: int
    of: int
    mean: float
    worst: float
    kl: float
    same_top: float

    def __str__(self) -> str:
        return (
            f"logprobs differ by {self.mean:.4f}, at most {self.worst:.2f}; KL {self.kl:.1e}; "
            f"same top token {self.same_top:.1%} ({self.steps} of {self.of} steps)"
        )


def _ask(server: Server, ids: list[int], tokens: int, start: int) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    return server.post("/generate", body | {"logprob_start_len": start, "top_logprobs_num": TOP})


def _distributions(rows: Iterable) -> list[dict[int, float]]:
    return [{token: logprob for logprob, token, _ in row} for row in rows if row]


def forced(server: Server, ids: list[int], start: int) -> Trace:
    """The distributions after each token from ``start`` on; SGLang then uses no cached prefix beyond ``start``."""
    answer = _ask(server, ids, 1, start)
    meta = answer["meta_info"]
    steps = _distributions(meta["input_top_logprobs"]) + _distributions(meta["output_top_logprobs"])
    assert len(steps) == len(ids) - start, f"{len(steps)} distributions for {len(ids) - start} tokens"
    return Trace([*ids[start + 1 :], *answer["output_ids"]], steps, meta)


def decoded(server: Server, asked: list[list[int]], tokens: int) -> list[Trace]:
    """Greedy tokens of all prompts at once, each with its distribution."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda ids: _ask(server, ids, tokens, -1), asked))
    traces = [
        Trace(a["output_ids"], _distributions(a["meta_info"]["output_top_logprobs"]), a["meta_info"]) for a in answers
    ]
    assert all(len(t.tokens) == len(t.steps) == tokens for t in traces), "an answer is shorter than asked for"
    return traces


def distance(ours: list[Trace], theirs: list[Trace]) -> Distance:
    """Of the same texts through two servers.

    Both are greedy and nothing forces a decoded token, so a text counts up to and including the first step at which
    the two choose differently: up to there, both distributions follow the very same tokens.
    """
    pairs, of = [], 0
    for a, b in zip(ours, theirs, strict=True):
        of += len(a.steps)
        for step in range(min(len(a.steps), len(b.steps))):
            pairs.append((a.steps[step], b.steps[step]))
            if a.tokens[step] != b.tokens[step]:
                break
    differences = [d for p, q in pairs for d in _differences(p, q)]
    return Distance(
        steps=len(pairs),
        of=of,
        mean=sum(differences) / len(differences),
        worst=max(differences),
        kl=sum(_kl(p, q) for p, q in pairs) / len(pairs),
        same_top=sum(max(p, key=p.get) == max(q, key=q.get) for p, q in pairs) / len(pairs),
    )


def _differences(p: dict[int, float], q: dict[int, float]) -> list[float]:
    least_p, least_q = min(p.values()), min(q.values())
    return [
        abs(p[t] - q[t]) if t in p and t in q else max(0.0, p[t] - least_q if t in p else q[t] - least_p) for t in p | q
    ]


def _kl(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(q || p), the better of two lower bounds: over the shared top and the rest as one token, which sees nothing
    where little is shared; and over the top of q, with what p gives each of them at most."""

    def rest(d: dict[int, float], tokens: Iterable[int]) -> float:
        return max(1e-6, 1 - sum(math.exp(d[t]) for t in tokens))

    shared, least_p = p.keys() & q.keys(), min(p.values())
    rest_p, rest_q, rest_top = rest(p, shared), rest(q, shared), rest(q, q)
    coarse = sum(math.exp(q[t]) * (q[t] - p[t]) for t in shared) + rest_q * math.log(rest_q / rest_p)
    at_most = sum(math.exp(q[t]) * (q[t] - p.get(t, least_p)) for t in q) + rest_top * math.log(rest_top / rest_p)
    return max(coarse, at_most)


def logits(server: Server, small: Server, encode: Encode, sizes: Sizes) -> dict[str, list[Trace]]:
    """Distributions of one configuration in every way that a token can reach its cache; ``distance`` compares two.

    Args:
        small: the same configuration with a pool that ``sizes.overflow`` requests overflow. Where it is ``server``
            itself, nothing is retracted: so a run without retraction is compared with.
    """
    text, long_text = prose(encode, sizes)
    runs = {}
    server.flush_cache()
    runs["cold"] = [forced(server, text, 0)]
    assert runs["cold"][0].meta["cached_tokens"] == 0
    runs["radix hit"] = [forced(server, text, sizes.hit)]
    assert 0 < runs["radix hit"][0].meta["cached_tokens"] <= sizes.hit
    # What the first chunk holds is what "cold" saw; here is what the later ones make of it.
    runs["chunked"] = [forced(server, long_text, sizes.chunk)]
    assert runs["chunked"][0].meta["cached_tokens"] == 0
    runs["decoded"] = decoded(server, [counting(encode, 1, sizes.context)], sizes.decoded)
    starts = range(100, 100 + 50 * sizes.batch, 50)
    runs["batch"] = decoded(server, [counting(encode, n, 60 + n % 64) for n in starts], sizes.steps)
    small.flush_cache()
    # All about as long, so that all outgrow a page at the same time.
    starts = range(1, 1 + 30 * sizes.overflow, 30)
    runs["retracted"] = decoded(small, [counting(encode, n, 118) for n in starts], sizes.steps + 16)
    retractions = sum(trace.meta["num_retractions"] for trace in runs["retracted"])
    assert retractions > 0 or small is server, "the small pool was not overflowed"
    return runs


def greedy(server: Server, encode: Encode) -> list[list[int]]:
    """50 tokens after each of the 12 fixed prompts, all at once; ``greedy_agreement`` compares two servers'."""
    return [
        a["output_ids"] for a in server.generate_together([encode(text) for text in prompts.COUNTING], prompts.TOKENS)
    ]


def greedy_agreement(ours: list[list[int]], theirs: list[list[int]]) -> tuple[float, float]:
    """Token match and sequence exact."""
    return prompts.token_match(ours, theirs), prompts.sequence_exact(ours, theirs)


# ---- pages ----------------------------------------------------------------------------------------------------


def residues(server: Server, encode: Encode, sizes: Sizes, *, tolerated: float = 0.0) -> ResidueFigures:
    """Prompts of a page and r tokens for every r: six at once begin as each does alone, with a cold and a warm cache.

    Six at once are cut by chunks elsewhere, and one of them may find another's page: so a beginning is right if the
    prompt has it alone, be its page cached or not.

    Args:
        tolerated: share of lengths that may begin otherwise all the same.
    """
    page = server.quantkv()["page_size"]
    asked = {r: counting(encode, 100 + 10 * r, page + r) for r in range(1, page, page // (sizes.residues or page))}
    asked[page - 1] = counting(encode, 100 + 10 * page, 2 * page - 1)
    asked[0] = counting(encode, 50, 2 * page)
    alone = {}
    for residue, ids in asked.items():
        server.flush_cache()
        cold, warm = (server.generate(ids, 8) for _ in range(2))
        assert cold["meta_info"]["cached_tokens"] == 0 and warm["meta_info"]["cached_tokens"] == page
        alone[residue] = [cold["output_ids"], warm["output_ids"]]
    figures = ResidueFigures(len(asked), unsteady=sorted(r for r, (cold, warm) in alone.items() if cold != warm))
    server.flush_cache()
    for run in ("cold", "warm"):
        with ThreadPoolExecutor(6) as pool:
            answers = dict(zip(asked, pool.map(lambda ids: server.generate(ids, 8), asked.values())))
        hits = sum(a["meta_info"]["cached_tokens"] >= page for a in answers.values())
        assert hits == (0 if run == "cold" else len(asked)), f"{hits} prefix hits of {len(asked)}, {run}"
        figures.wrong += [(r, run) for r, answer in answers.items() if answer["output_ids"] not in alone[r]]
    assert len({r for r, _ in figures.wrong}) <= tolerated * len(asked), f"beginnings differ: {figures}"
    return figures


@dataclass
class ResidueFigures:
    """See ``residues``; ``unsteady`` are the residues whose prompt has two beginnings alone, cold and warm."""

    lengths: int
    unsteady: list[int]
    wrong: list[tuple[int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.lengths} lengths, wrong {self.wrong or 'none'}, cold and warm differ alone {self.unsteady or 'none'}"


@dataclass
class PoolFigures:
    """What a full pool went through; see ``full_pool``."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    aborted: int = 0
    retractions: int = 0
    hits: int = 0
    evicted: int = 0
    peak: float = 0.0
    unsteady: int = 0

    @property
    def is_enough(self) -> bool:
        """Whether everything that the pool is to go through has happened."""
        events = (self.aborted, self.retractions, self.hits, self.evicted, self.peak == 1.0)
        return all(events) and self.compared >= 12

    def __str__(self) -> str:
        return (
            f"{self.compared} answers compared, {len(self.wrong)} differ; {self.aborted} aborted, {self.retractions} "
            f"retractions, {self.hits} prefix hits, {self.evicted} evicted prefixes, peak use {self.peak:.0%}"
            + (f", {self.unsteady} prompts left out" if self.unsteady else "")
        )


def full_pool(server: Server, encode: Encode, sizes: Sizes, *, tolerated: float = 0.0) -> PoolFigures:
    """Many workers on a pool that holds few requests: shared prefixes, evictions, retractions, clients that leave and
    ask again. Every answer is the one that its prompt gets alone, and at the end no page is missing.

    A prompt counts only if it gets one answer alone, whether its prefix is cached or not: what the first chunk's
    higher precision decides says nothing about pages. At most a third may be left out, which the figures state.

    Args:
        tolerated: share of answers that may differ all the same, where a batch's rounding decides a token.
    """
    page, pool_tokens = (server.quantkv()[key] for key in ("page_size", "max_total_num_tokens"))
    figures = PoolFigures()
    solo: dict[tuple[int, ...], list[int]] = {}
    # All end a little before a page does, so that answers need one more when the pool may have none left.
    texts = [
        counting(encode, 1 + 100 * prefix, (2 - suffix % 2) * page - 3 * suffix - 3)
        for prefix in range(sizes.prefixes)
        for suffix in range(sizes.suffixes)
    ]
    for ids in texts:
        server.flush_cache()
        cold, warm = (server.generate(ids, sizes.answer) for _ in range(2))
        assert [a["meta_info"]["cached_tokens"] for a in (cold, warm)] == [0, len(ids) // page * page]
        if cold["output_ids"] == warm["output_ids"]:
            solo[tuple(ids)] = cold["output_ids"]
    figures.unsteady = len(texts) - len(solo)
    assert figures.unsteady <= len(texts) / 3, f"{figures.unsteady} of {len(texts)} prompts have two answers alone"
    server.flush_cache()

    lock, start = threading.Lock(), time.monotonic()

    def goes_on() -> bool:
        elapsed = time.monotonic() - start
        return elapsed < sizes.seconds or elapsed < sizes.seconds + 300 and not figures.is_enough

    seen: set[tuple[int, ...]] = set()  # prefixes served before

    def work(worker: int) -> None:
        rng = random.Random(worker)
        while goes_on():
            ids = rng.choice(list(solo))
            for _ in range(rng.choice((0, 0, 1, 2))):  # leave, and ask again
                leave(server, list(ids), sizes.answer, after=rng.randrange(4), wait=rng.random() / 10)
                with lock:
                    figures.aborted += 1
            answer = server.generate(list(ids), sizes.answer)
            meta = answer["meta_info"]
            with lock:
                figures.compared += 1
                figures.retractions += meta["num_retractions"]
                figures.hits += meta["cached_tokens"] > 0
                figures.evicted += len(ids) > page and ids[:page] in seen and meta["cached_tokens"] == 0
                seen.add(ids[:page])
                if answer["output_ids"] != solo[ids]:
                    figures.wrong.append(
                        f"{answer['output_ids']} instead of {solo[ids]} (prompt of {len(ids)} from {ids[:8]}, "
                        f"{meta['cached_tokens']} cached, {meta['num_retractions']} retractions)"
                    )

    with ThreadPoolExecutor(sizes.workers) as pool:
        workers = [pool.submit(work, n) for n in range(sizes.workers)]
        while not all(w.done() for w in workers):
            figures.peak = max(figures.peak, load(server)["num_used_tokens"] / pool_tokens)
            time.sleep(0.02)
    for w in workers:
        w.result()
    assert figures.is_enough, f"too little happened: {figures}"
    share = len(figures.wrong) / figures.compared
    assert share <= tolerated, f"{share:.2%} of answers differ ({figures}), such as\n" + "\n".join(figures.wrong[:5])
    check_no_page_is_missing(server)
    return figures


def leave(server: Server, ids: list[int], tokens: int, *, after: int, wait: float) -> None:
    """A client that hangs up: after so many events of its stream; after ``wait`` seconds where that is 0."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
    connection.request("POST", "/generate", json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    if after:
        response = connection.getresponse()
        for _ in range(2 * after):  # an event is a line and an empty one
            response.readline()
        response.close()
    else:
        time.sleep(wait)
    connection.close()


def load(server: Server) -> dict:
    """SGLang's own accounting; ``num_used_tokens`` are neither free nor evictable."""
    return server.get("/v1/loads")["loads"][0]


def check_no_page_is_missing(server: Server) -> None:
    """All requests end, every page is free or evictable, and the server lives: SGLang's own check raises when idle.

    The accounting is read before the cache is flushed: a flush makes a new list of free pages, whatever was lost.
    """
    deadline = time.monotonic() + 60
    while (state := load(server))["num_running_reqs"] or state["num_waiting_reqs"] or state["num_used_tokens"]:
        assert time.monotonic() < deadline, f"a minute after the last client left, the server has {state}"
        time.sleep(0.1)
    assert len(server.generate([3, 4, 5], 4)["output_ids"]) == 4
    log = server.log.read_text()
    assert "leak" not in log.lower() and "Traceback" not in log, f"see {server.log}"


# ---- routes ---------------------------------------------------------------------------------------------------


def routes(server: Server, encode: Encode, sizes: Sizes) -> dict[str, int]:
    """Every phase ran as often as the work implies, and nothing fell back.

    Returns:
        calls by phase of a cold prompt, its radix hit with ``sizes.steps`` tokens, and a prompt of several chunks.
    """
    layers = sum(pool["num_layers"] for pool in server.quantkv()["pools"])
    text, long_text = prose(encode, sizes)
    chunks = -(-sizes.long // sizes.chunk)
    server.flush_cache()
    total: Counter[str] = Counter()
    for ids, tokens, first_chunks, extends in (
        (text, 1, 1, 0),
        (text, sizes.steps, 0, 1),
        (long_text, 1, 1, chunks - 1),
    ):
        before = _calls(server)
        server.generate(ids, tokens)
        grown = _calls(server)
        grown.subtract(before)
        assert grown["first_chunk"] == first_chunks * layers, f"first chunks: {grown}, {layers} layers"
        assert grown["extend"] == extends * layers, f"extends: {grown}, {layers} layers"
        # The last token is never written; the overlap schedule runs one step more than it needs.
        assert grown["decode"] in ((tokens - 1) * layers, tokens * layers), f"{tokens} tokens: {grown}, {layers} layers"
        assert grown["store"] == grown["first_chunk"] + grown["extend"] + grown["decode"], f"stores: {grown}"
        total.update(grown)
    assert not server.quantkv().get("fallbacks"), server.quantkv()["fallbacks"]
    return dict(total)


def _calls(server: Server) -> Counter[str]:
    """Calls by phase, once they no longer grow: a step may still run when the last token is out."""
    while True:
        calls = server.quantkv()["calls"]
        time.sleep(0.3)
        if server.quantkv()["calls"] == calls:
            phases = ("store", "first_chunk", "extend", "decode")
            return Counter({p: sum(n for name, n in calls.items() if name.startswith(f"{p}_")) for p in phases})
