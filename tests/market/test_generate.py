"""Generated traces: the same by seed, and what they say they are."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from blendkv.errors import InputError
from blendkv.market.base import Use
from blendkv.market.generate import ENGINE_RATE, ENGINES, MISTAKES, RATE, SHARES, TRACES, generate, mislabel
from blendkv.market.trace import Block, Request, Trace
from blendkv.market.workloads import TOOLS

SEED = 21


def classes(trace: Trace) -> dict[str, float]:
    counted = Counter(r.use.workload for r in trace)
    return {name: count / len(trace) for name, count in counted.items()}


def sessions(trace: Trace) -> dict[str, list[Request]]:
    found: dict[str, list[Request]] = defaultdict(list)
    for request in trace:
        if request.use.session:
            found[request.use.session].append(request)
    return found


@pytest.mark.parametrize("name", TRACES.names())
def test_same_seed_same_trace(name: str) -> None:
    trace = generate(name, SEED, 600, ENGINE_RATE)
    assert len(trace.check()) == 600
    assert trace.requests == generate(name, SEED, 600, ENGINE_RATE).requests
    assert trace.requests != generate(name, SEED + 1, 600, ENGINE_RATE).requests
    assert trace.requests[0].arrival >= 0.0
    assert name in trace.about
    assert str(SEED) in trace.about
    assert len(trace.about) > 60


def test_a_mixed_trace_has_its_shares_and_its_rate() -> None:
    """4,000 requests of some 500 sessions: an agent's 16 turns come together, so shares scatter by 3 points."""
    trace = generate("mixed", SEED, 4000, ENGINE_RATE)
    found = classes(trace)
    assert set(found) == set(SHARES)
    for name, share in SHARES.items():
        assert found[name] == pytest.approx(share, abs=0.07), found
    assert len(trace) / trace.span == pytest.approx(ENGINE_RATE, rel=0.15)
    assert RATE == ENGINES * ENGINE_RATE
    assert sum(SHARES.values()) == 1.0


@pytest.mark.parametrize("name", list(SHARES))
def test_a_trace_of_one_class_has_no_other(name: str) -> None:
    assert classes(generate(name, SEED, 300, ENGINE_RATE)) == {name: 1.0}


@pytest.mark.parametrize("name", ["agent", "chat"])
def test_turns_go_on_where_the_last_one_ended(name: str) -> None:
    """A turn's prefix is the last turn's and what that made; it comes after the last answer and the gap."""
    found = [turns for turns in sessions(generate(name, SEED, 1500, ENGINE_RATE)).values() if len(turns) > 1]
    assert len(found) > 20
    for turns in found:
        for before, after in pairwise(turns):
            assert after.prefix == before.prefix + before.made
            assert sum(block.tokens for block in before.made) == before.fresh + before.output
            assert after.arrival > before.arrival + after.gap > before.arrival
    shared = Counter(turns[0].prefix[0] for turns in found)
    assert len(shared) <= 6


def test_agents_are_as_described() -> None:
    found = sessions(generate("agent", SEED, 4000, ENGINE_RATE))
    whole = [turns for turns in found.values() if turns[0].gap == 0.0 and turns[-1].hint != "tool_started"]
    assert len(whole) > 50
    assert all(8 <= len(turns) <= 25 for turns in whole)
    assert all(3000 <= sum(b.tokens for b in turns[0].prefix) <= 6000 for turns in whole)
    assert all(r.hint == "tool_started" for turns in whole for r in turns[:-1])
    calls = [(before.ttl, after.gap) for turns in whole for before, after in pairwise(turns)]
    for tool in TOOLS:  # told apart by their timeouts
        gaps = [gap for ttl, gap in calls if ttl == tool.timeout]
        assert len(gaps) / len(calls) == pytest.approx(tool.share, abs=0.05)
        assert statistics.median(gaps) == pytest.approx(tool.median, rel=0.15)
    assert any(gap > ttl for ttl, gap in calls)  # some tools take longer than they should
    ends = [turns[-1].hint == "session_ended" for turns in whole]
    assert statistics.mean(ends) == pytest.approx(0.7, abs=0.15)
    assert all(turns[-1].hint in ("session_ended", None) for turns in whole)


def test_chats_are_as_described() -> None:
    found = sessions(generate("chat", SEED, 6000, ENGINE_RATE))
    turns = [
        len(t) for t in found.values() if t[0].gap == 0.0 and t[0].arrival < 900.0
    ]  # most of them end in the trace
    assert statistics.mean(turns) == pytest.approx(5.0, rel=0.25)
    assert statistics.median(r.gap for t in found.values() for r in t[1:]) == pytest.approx(60.0, rel=0.15)


def test_rag_asks_for_six_distinct_chunks_of_one_corpus_by_zipf() -> None:
    trace = generate("rag", SEED, 4000, ENGINE_RATE)
    orders: dict[frozenset[Block], set[tuple[Block, ...]]] = defaultdict(set)
    for request in trace:
        assert len(set(request.chunks)) == 6
        (corpus,) = {block.key.split("/")[0] for block in request.chunks}
        assert all(block.key.startswith(f"{corpus}-system/") for block in request.prefix)
        assert not request.made
        orders[frozenset(request.chunks[:2])].add(request.chunks[:2])
    assert any(len(order) == 2 for order in orders.values())  # the same two, either way round
    first = Counter(b for r in trace for b in r.chunks if b.key.startswith("corpus-0/"))
    top = sum(count for _, count in first.most_common(45)) / first.total()
    assert 0.4 < top < 0.7, top  # 3 % of the chunks: 56 % of independent draws, less as a request repeats none


def test_singles_never_come_again() -> None:
    trace = generate("single", SEED, 500, ENGINE_RATE)
    own = [block.key for request in trace for block in request.made]
    assert len(own) == len(set(own))
    assert all(500 <= request.fresh <= 6000 for request in trace)
    assert len({request.prefix for request in trace}) <= 8


def test_bursts_come_together() -> None:
    """Counts per 10 s scatter far more than a Poisson process's, whose variance is its mean."""

    def scatter(name: str) -> float:
        trace = generate(name, SEED, 4000, ENGINE_RATE)
        first = {r.use.session or id(r): r.arrival for r in reversed(trace.requests) if r.gap == 0.0}
        counts = Counter(int(at // 10) for at in first.values())
        slots = [counts[n] for n in range(int(trace.span // 10))]
        return statistics.variance(slots) / statistics.mean(slots)

    assert scatter("bursts") > 2.5 * scatter("mixed")


def test_drift_moves_the_head_of_the_ranking() -> None:
    def common(name: str) -> int:
        asked = [(r.arrival, b) for r in generate(name, SEED, 6000, ENGINE_RATE) for b in r.chunks]
        middle = asked[len(asked) // 2][0]
        heads = [
            {block for block, _ in Counter(b for at, b in asked if (at < middle) is early).most_common(30)}
            for early in (True, False)
        ]
        return len(heads[0] & heads[1])

    assert common("mixed") > 15
    assert common("drift") < common("mixed") / 2


def test_a_scan_reads_each_chunk_once_in_the_middle_third() -> None:
    trace = generate("scan", SEED, 4000, ENGINE_RATE)
    times = {4000 / ENGINE_RATE * (1 + n / 500) / 3 for n in range(500)}
    scanned = [request for request in trace if request.arrival in times]
    read = [block.key for request in scanned for block in request.chunks]
    assert len(scanned) == 500
    assert read == [f"corpus-{n // 1500}/{n % 1500}" for n in range(3000)]
    assert classes(trace)["rag"] == pytest.approx(0.25 * 7 / 8 + 1 / 8, abs=0.06)


def test_wrong_tags() -> None:
    right = generate("mixed", SEED, 2000, ENGINE_RATE)
    all_wrong = mislabel(right, 1.0, SEED)
    assert [r.use.workload for r in all_wrong] == [MISTAKES[r.use.workload] for r in right]
    assert set(MISTAKES) == set(MISTAKES.values()) == set(SHARES)
    some = mislabel(right, 0.2, SEED)
    changed = [(a, b) for a, b in zip(right, some, strict=True) if a.use.workload != b.use.workload]
    assert len(changed) / len(right) == pytest.approx(0.2, abs=0.03)
    assert [r._replace(use=Use()) for r in some] == [r._replace(use=Use()) for r in right]
    assert mislabel(right, 0.0, SEED).requests == right.requests
    assert [r._replace(use=Use()) for r in generate("mislabelled100", SEED, 2000, ENGINE_RATE)] == [
        r._replace(use=Use()) for r in right
    ]


def test_wrong_input() -> None:
    with pytest.raises(InputError, match="unknown trace 'mixd'; allowed: mixed, agent"):
        generate("mixd", 1)
    with pytest.raises(InputError, match="both must be above 0"):
        generate("mixed", 1, length=0)
    with pytest.raises(InputError, match="both must be above 0"):
        generate("mixed", 1, rate=0.0)
    with pytest.raises(InputError, match=r"share of wrong tags is 1\.5"):
        mislabel(generate("mixed", 1, 5), 1.5, 1)
