"""The loading planner: its choice is the best of all, its budget fills the wait, and it forgets no tier."""

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rates import book_of, request_of

from blendkv.blend import BlendSettings
from blendkv.blend.loading import LoadingPlanner, StoredChunk, least
from blendkv.blend.rates import READY, RETRY, RateBook

STRIDED = BlendSettings("strided", 0.03)
QUERY = BlendSettings("head_query", 0.05)
SETTINGS = [
    STRIDED, QUERY, BlendSettings("chunk_head", 0.2), BlendSettings("strided", 0.0), BlendSettings("strided", 1.0),
]  # fmt: skip
ROW = 1e-3


def subsets(n):
    return [frozenset(c) for k in range(n + 1) for c in combinations(range(n), k)]


def loaded(request, plan):
    return {i for i, c in enumerate(request.chunks) if not {s.index for s in c.spans} & set(plan.recompute)}


@given(st.integers(0, 2**31), st.sampled_from(SETTINGS), st.integers(1, 6))
def test_no_choice_is_predicted_to_be_faster(seed, settings, count):
    """Against all 2^n choices, each predicted by itself."""
    rng = random.Random(seed)
    book = book_of(
        rng, row=ROW, pair=rng.choice((0.0, 1e-5)), move=rng.uniform(0, 1e-4), unhidden=rng.choice((0, 0.2)),
        score=rng.choice((None, 2e-3)), read={t: 10 ** rng.uniform(-7, -4) for t in ("disk", "remote")},
    )  # fmt: skip
    tiers = [rng.choice(("memory", "disk", "remote")) for _ in range(count)]
    request = request_of(settings, [rng.randint(1, 300) for _ in range(count)], tiers)
    planner = LoadingPlanner(book, margin=0.0)
    chosen = loaded(request, planner.plan(request))
    totals = {s: planner.predict(request, s, settings.asked)["total"] for s in subsets(len(request.chunks))}
    assert totals[frozenset(chosen)] <= min(totals.values()) * (1 + 1e-9)


numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


@given(st.tuples(numbers, numbers), st.lists(st.tuples(numbers, numbers), max_size=8))
def test_the_best_prefix_is_within_one_chunk_of_the_optimum(base, each):
    at, gains = np.array(base), np.array(each).reshape(-1, 2)
    ways = (np.arange(1 << len(gains))[:, None] >> np.arange(len(gains))) & 1
    optimum = (at + ways @ gains).max(1).min()

    def reached(exhaustive):
        return (at + np.array(least(at, gains, exhaustive), dtype=float) @ gains).max()

    contested = np.abs(gains[(gains.min(1) < 0) & (gains.max(1) > 0)])
    assert reached(12) == pytest.approx(optimum, abs=1e-9)
    assert reached(0) <= optimum + (contested.min(1).max() if len(contested) else 0.0) + 1e-9


def test_a_slow_tier_is_recomputed_and_a_fast_one_loaded():
    request = request_of(STRIDED, [100, 100, 100], ["disk", "remote", "disk"])
    book = book_of(random.Random(0), row=ROW, read={"disk": 1e-7, "remote": 1e-4})  # 1 ms, 1 s for 100 tokens
    plan = LoadingPlanner(book).plan(request)
    assert plan.recompute == (2,)  # segment 0 is the system prefix
    assert plan.predicted["read"] == pytest.approx(2e-3, rel=0.05)
    fast = book_of(random.Random(0), row=ROW, read={"disk": 1e-7, "remote": 1e-7})
    assert LoadingPlanner(fast).plan(request).recompute == ()


def test_what_memory_holds_is_loaded():
    request = request_of(QUERY, [80] * 4, ["memory"] * 4)
    plan = LoadingPlanner(book_of(random.Random(0), row=ROW, move=1e-6, read={})).plan(request)
    assert plan.recompute == ()
    assert plan.predicted["read"] == 0.0


def test_a_small_gain_by_prediction_is_not_taken():
    """Loading all takes 150 ms of reading and a layer's computing, and recomputing the slow chunk 142 ms in all."""
    request = request_of(STRIDED, [100, 1000], ["remote", "memory"])
    book = book_of(random.Random(0), row=ROW, read={"remote": 1.5e-5})
    assert LoadingPlanner(book, margin=0.0).plan(request).recompute == (1,)
    assert LoadingPlanner(book, margin=0.1).plan(request).recompute == ()


def test_the_budget_rises_while_loading_is_the_bottleneck():
    sizes, tiers = [100] * 5, ["disk"] * 5
    request = request_of(STRIDED, sizes, tiers)
    book = book_of(random.Random(0), row=ROW, read={"disk": 2e-6})  # 100 ms of reading; 12 + 500 r ms of recompute
    planner = LoadingPlanner(book, margin=1.0)
    plan = planner.plan(request)
    before = planner.predict(request, range(6), 0.03)
    assert before["read"] > before["recompute"]
    assert plan.budget == pytest.approx((0.9 * 0.1 - 0.012) / 0.5, rel=0.05)
    assert plan.budget_asked == 0.03
    assert plan.predicted["recompute"] <= plan.predicted["read"]
    assert plan.predicted["total"] <= before["total"] + before["read"] / request.layers
    assert LoadingPlanner(book, max_budget=0.1, margin=1.0).plan(request).budget == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "tier"),
    [
        (QUERY, "disk"),  # its recompute begins when all is read
        (BlendSettings("strided", 0.0), "disk"),  # full reuse is asked for
        (BlendSettings("strided", 0.5), "disk"),  # above the limit already
        (STRIDED, "memory"),
    ],
)
def test_a_budget_that_is_not_raised(settings, tier):
    request = request_of(settings, [100] * 5, [tier] * 5)
    book = book_of(random.Random(0), row=ROW, read={"disk": 2e-6})
    assert LoadingPlanner(book, margin=1.0).plan(request).budget == settings.asked


@given(st.integers(0, 2**31), st.floats(0.001, 1.0), st.sampled_from(["strided", "head_query", "kv_deviation"]))
def test_a_budget_is_never_lowered_nor_raised_above_the_limit(seed, asked, selector):
    rng = random.Random(seed)
    book = book_of(rng, row=10 ** rng.uniform(-5, -2), read={"disk": 10 ** rng.uniform(-7, -4)})
    request = request_of(BlendSettings(selector, asked), [rng.randint(1, 300) for _ in range(4)], ["disk"] * 4)
    plan = LoadingPlanner(book, max_budget=0.3).plan(request)
    assert asked <= plan.budget <= max(asked, 0.3)
    assert plan == LoadingPlanner(book, max_budget=0.3).plan(request)


def test_a_deviation_rule_keeps_the_exact_chunk_that_its_budget_rests_on():
    request = request_of(BlendSettings("kv_deviation", 0.3), [400, 50, 50], ["remote"] * 3)
    plan = LoadingPlanner(book_of(random.Random(0), row=ROW, read={"remote": 1e-3})).plan(request)
    assert plan.recompute == (2, 3)


def test_nothing_is_decided_by_too_few_observations():
    request = request_of(STRIDED, [100, 100], ["remote", "memory"])
    plan = LoadingPlanner(RateBook()).plan(request)
    assert (plan.recompute, plan.budget, plan.predicted) == ((), 0.03, None)
    book = book_of(random.Random(0), row=ROW, read={})
    for _ in range(READY - 1):
        book.read["remote"].add((8, 10_000), 100.0)
    plan = LoadingPlanner(book).plan(request)
    assert (plan.recompute, plan.predicted) == ((), None)
    book.read["remote"].add((8, 10_000), 100.0)
    plan = LoadingPlanner(book).plan(request)
    assert plan.recompute == (1,)
    assert plan.predicted is not None


def test_one_wild_observation_flips_no_decision():
    request = request_of(STRIDED, [100, 100, 100], ["disk", "disk", "remote"])
    book = book_of(random.Random(0), row=ROW, read={"disk": 1e-7, "remote": 1e-4})
    planner = LoadingPlanner(book)
    before = planner.plan(request).recompute
    book.read["disk"].add((8, 10_000), 1000.0)
    book.read["remote"].add((8, 10_000), 1e-6)
    book.recompute.add((1.0, 100.0, 1e4), 1000.0)
    assert planner.plan(request).recompute == before == (3,)


def test_a_tier_left_alone_for_long_is_tried_with_its_smallest_chunk():
    request = request_of(STRIDED, [100, 90, 100], ["remote"] * 3)
    book = book_of(random.Random(0), row=ROW, read={"remote": 1e-4})
    book.avoided["remote"] = RETRY - 1
    planner = LoadingPlanner(book)
    assert planner.plan(request).recompute == (1, 2, 3)
    book.avoided["remote"] = RETRY
    plan = planner.plan(request)
    assert (plan.recompute, plan.retried) == ((1, 3), ("remote",))


def test_a_chunk_that_stands_twice_is_read_once():
    request = request_of(STRIDED, [100, 100, 100], ["remote"] * 3)
    system, one, two, three = request.chunks
    twice = StoredChunk((*two.spans, *three.spans), "remote", two.nbytes)
    joined = replace(request, chunks=(system, one, twice))
    book = book_of(random.Random(0), row=ROW, read={"remote": 1.5e-5})  # 150 ms a chunk, 100 ms to recompute one
    assert LoadingPlanner(book).plan(request).recompute != ()
    plan = LoadingPlanner(book).plan(joined)
    assert not {2, 3} & set(plan.recompute)
