"""Belady offline: by hand, against the best there is, and against every other policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.market import adaptive, classic, density, greedy, marconi, ttl
from blendkv.market.base import NOBODY, EvictionPolicy, Item
from blendkv.market.belady import BeladyCostPolicy, BeladyPolicy

ALL = 10**9
ONLINE: tuple[Callable[[int], EvictionPolicy], ...] = (
    classic.FifoPolicy,
    classic.LruPolicy,
    classic.LfuPolicy,
    adaptive.ArcPolicy,
    adaptive.LecarPolicy,
    density.LhdPolicy,
    greedy.GdsfPolicy,
    greedy.PgdsfPolicy,
    marconi.MarconiPolicy,
    ttl.TtlPolicy,
)


def replay(policy: EvictionPolicy, uses: Sequence[str], capacity: int) -> int:
    """Hits of a cache of ``capacity`` blocks of 1 byte, one use a second."""
    held: set[str] = set()
    hits = 0
    for now, key in enumerate(uses):
        if key in held:
            hits += 1
            policy.touched(key, NOBODY, now)
            continue
        item = Item(1, 1.0)
        leaving = policy.victims(len(held) + 1 - capacity, {key}, now)
        if not policy.admits(key, item, NOBODY, leaving, now):
            continue
        for gone in leaving:
            held.remove(gone)
            policy.removed(gone, now)
        held.add(key)
        policy.added(key, item, NOBODY, now)
        assert len(held) <= capacity
    return hits


def test_by_hand() -> None:
    policy = BeladyPolicy([(2.0, "b"), (3.0, "b"), (5.0, "b"), (10.0, "a"), (12.0, "d")])
    for key in "abc":
        policy.added(key, Item(10, 1.0), NOBODY, 1.0)
    assert policy.victims(ALL, (), 1.0) == ["c", "a", "b"]  # never, at 10, at 2
    assert policy.victims(10, {"c"}, 1.0) == ["a"]
    assert policy.victims(11, (), 1.0) == ["c", "a"]
    policy.touched("b", NOBODY, 2.0)  # next at 3
    assert policy.victims(ALL, (), 2.0) == ["c", "a", "b"]
    assert policy.victims(ALL, (), 6.0) == ["c", "b", "a"]  # 5 has passed, though b was not touched
    assert not policy.admits("d", Item(10, 1.0), NOBODY, ["a"], 6.0)  # 12 is later than 10
    assert policy.admits("d", Item(10, 1.0), NOBODY, ["a", "c"], 6.0)  # c is never used again
    assert not policy.admits("e", Item(10, 1.0), NOBODY, ["c"], 6.0)  # neither is e
    assert policy.admits("e", Item(10, 1.0), NOBODY, [], 6.0)  # nothing leaves
    policy.removed("c", 6.0)
    assert policy.victims(ALL, (), 6.0) == ["b", "a"]
    policy.removed("a", 6.0)
    policy.added("a", Item(30, 1.0), NOBODY, 11.0)
    assert policy.victims(ALL, (), 11.0) == ["b", "a"]  # neither is used again; b was known to be before


def test_cost_by_hand() -> None:
    """Worth is saved / bytes: a 1/16, b 1/64, c 1/16, d 0."""
    uses = [(10.0, "c"), (20.0, "b"), (40.0, "a"), (5.0, "d"), (7.0, "e")]
    policy = BeladyCostPolicy(sorted(uses))
    for key, nbytes, saved in (("a", 16, 1.0), ("b", 64, 1.0), ("c", 32, 2.0), ("d", 16, 0.0)):
        policy.added(key, Item(nbytes, saved), NOBODY, 0.0)
    # (next use) / worth: d infinite; b 20 x 64 = 1280; a 40 x 16 = 640; c 10 x 16 = 160.
    assert policy.victims(ALL, (), 0.0) == ["d", "b", "a", "c"]
    assert policy.admits("e", Item(64, 1.0), NOBODY, ["a"], 0.0)  # 7 x 64 = 448
    assert not policy.admits("e", Item(128, 1.0), NOBODY, ["a"], 0.0)  # 7 x 128 = 896
    # At 15: b (20 - 15) x 64 = 320; a (40 - 15) x 16 = 400; c and d are not used again.
    assert policy.victims(ALL, {"c", "d"}, 15.0) == ["a", "b"]
    assert set(policy.victims(48, (), 15.0)) == {"c", "d"}


def test_cost_keeps_prefixes_whole() -> None:
    policy = BeladyCostPolicy([(10.0, "0"), (10.0, "1"), (10.0, "x")])
    policy.added("1", Item(64, 4.0, "0"), NOBODY, 0.0)
    policy.added("0", Item(64, 1.0), NOBODY, 0.0)  # lifted to 1/16
    policy.added("x", Item(64, 2.0), NOBODY, 0.0)
    assert policy.victims(ALL, (), 1.0) == ["x", "1", "0"]
    policy.removed("1", 1.0)
    policy.touched("0", NOBODY, 1.0)
    assert policy.victims(ALL, (), 1.0) == ["0", "x"]


def test_unknown_keys_have_no_future() -> None:
    policy = BeladyPolicy([])
    policy.added("a", Item(1, 1.0), NOBODY, 0.0)
    assert policy.victims(1, (), 5.0) == ["a"]
    assert policy._next("b", 0.0) == math.inf


def best(uses: Sequence[str], capacity: int) -> int:
    """Most hits that any sequence of decisions reaches, by trying all."""
    states = {frozenset[str](): 0}
    for key in uses:
        following: dict[frozenset[str], int] = {}
        for held, hits in states.items():
            if key in held:
                options = [held]
            elif len(held) < capacity:
                options = [held, held | {key}]
            else:
                options = [held, *((held - {gone}) | {key} for gone in held)]
            for option in options:
                following[option] = max(following.get(option, 0), hits + (key in held))
        states = following
    return max(states.values())


@given(uses=st.lists(st.sampled_from("abcdefg"), max_size=40), capacity=st.integers(1, 4))
@settings(deadline=None)
def test_nothing_is_better(uses: list[str], capacity: int) -> None:
    """Blocks that are alike: as many hits as there can be, so that no other policy has more."""
    future = list(enumerate(uses))
    assert replay(BeladyPolicy(future), uses, capacity) == best(uses, capacity)
    assert replay(BeladyCostPolicy(future), uses, capacity) == best(uses, capacity)


@pytest.mark.parametrize("make", ONLINE)
@given(uses=st.lists(st.sampled_from("abcdefgh"), min_size=20, max_size=100), capacity=st.integers(1, 5))
@settings(deadline=None, max_examples=30)
def test_no_policy_beats_it(make: Callable[[int], EvictionPolicy], uses: list[str], capacity: int) -> None:
    assert replay(make(capacity), uses, capacity) <= replay(BeladyPolicy(enumerate(uses)), uses, capacity)
