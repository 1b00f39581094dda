"""FIFO, LRU and LFU: by hand, and against naive ones; the ranking that LFU and others stand on, against sorting."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.market.base import NOBODY, POLICIES, EvictionPolicy, Item
from blendkv.market.classic import FifoPolicy, LfuPolicy, LruPolicy
from blendkv.market.ranking import Ranking

BLOCK = Item(10, 1.0)
ALL = 10**9


def play(policy: EvictionPolicy, uses: str) -> None:
    """Add a key at its first use, touch it after that."""
    seen: set[str] = set()
    for now, key in enumerate(uses):
        if key in seen:
            policy.touched(key, NOBODY, now)
        else:
            policy.added(key, BLOCK, NOBODY, now)
        seen.add(key)


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (FifoPolicy, "abcd"),  # as they came
        (LruPolicy, "cbda"),  # last uses: a at 7, b at 4, c at 2, d at 6
        (LfuPolicy, "cbda"),  # counts: a 3, b 2, c 1, d 2; b was used before d
    ],
)
def test_by_hand(make: Callable[[int], EvictionPolicy], order: str) -> None:
    policy = make(1000)
    play(policy, "abcabdda")
    assert policy.victims(ALL, (), 9.0) == list(order)
    assert policy.victims(10, (), 9.0) == [order[0]]
    assert policy.victims(11, (), 9.0) == list(order[:2])
    assert policy.victims(10, {order[0]}, 9.0) == [order[1]]
    assert policy.victims(0, (), 9.0) == []
    policy.removed(order[1], 9.0)
    assert policy.victims(ALL, (), 9.0) == [order[0], *order[2:]]
    assert policy.admits("e", BLOCK, NOBODY, [order[0]], 9.0)


def test_lfu_forgets_counts_with_the_block() -> None:
    policy = LfuPolicy(1000)
    play(policy, "aaaabb")
    policy.removed("a", 6.0)
    policy.added("a", BLOCK, NOBODY, 7.0)
    assert policy.victims(ALL, (), 8.0) == ["a", "b"]


def test_added_again_is_a_use_and_a_new_size() -> None:
    for make, order in ((FifoPolicy, "ab"), (LruPolicy, "ba"), (LfuPolicy, "ba")):
        policy: EvictionPolicy = make(1000)  # type: ignore[abstract]
        play(policy, "ab")
        policy.added("a", Item(30, 1.0), NOBODY, 2.0)
        assert policy.victims(ALL, (), 3.0) == list(order)
        assert policy.victims(30, {"b"}, 3.0) == ["a"]
        assert policy.victims(11, (), 3.0) == (["a"] if order == "ab" else ["b", "a"])


def test_names() -> None:
    for name, made in (("fifo", FifoPolicy), ("lru", LruPolicy), ("lfu", LfuPolicy)):
        assert POLICIES.get(name) is made
    with pytest.raises(InputError, match=r"unknown eviction policy 'mru'; allowed: .*lru"):
        POLICIES.get("mru")


class Naive:
    """Every block as (key, bytes, came, used, count), sorted anew each time."""

    def __init__(self, order: Callable[[list[int]], tuple[int, ...]]) -> None:
        self.order = order
        self.blocks: dict[str, list[int]] = {}

    def use(self, key: str, nbytes: int | None, now: int) -> None:
        if key not in self.blocks:
            if nbytes is None:
                return
            self.blocks[key] = [nbytes, now, now, 0]
        block = self.blocks[key]
        block[0] = block[0] if nbytes is None else nbytes
        block[2] = now
        block[3] += 1

    def victims(self, nbytes: int, keep: set[str]) -> list[str]:
        chosen: list[str] = []
        for key in sorted(self.blocks.keys() - keep, key=lambda key: self.order(self.blocks[key])):
            if sum(self.blocks[gone][0] for gone in chosen) < nbytes:
                chosen.append(key)
        return chosen


KEYS = st.sampled_from("abcdefgh")
EVENTS = st.one_of(
    st.tuples(st.just("add"), KEYS, st.integers(1, 50)),
    st.tuples(st.just("touch"), KEYS, st.none()),
    st.tuples(st.just("remove"), KEYS, st.none()),
    st.tuples(st.just("ask"), st.sets(KEYS, max_size=4), st.integers(0, 200)),
)


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (FifoPolicy, lambda block: (block[1],)),
        (LruPolicy, lambda block: (block[2],)),
        (LfuPolicy, lambda block: (block[3], block[2])),
    ],
)
@given(events=st.lists(EVENTS, max_size=60))
def test_against_naive_ones(
    make: Callable[[int], EvictionPolicy], order: Callable[[list[int]], tuple[int, ...]], events: list[tuple]
) -> None:
    policy, naive = make(1000), Naive(order)
    for now, (what, key, number) in enumerate(events):
        if what == "ask":
            assert policy.victims(number, key, now) == naive.victims(number, key)
        elif what == "remove":
            policy.removed(key, now)
            naive.blocks.pop(key, None)
        else:
            if what == "add":
                policy.added(key, Item(number, 1.0), NOBODY, now)
            else:
                policy.touched(key, NOBODY, now)
            naive.use(key, number, now)
    assert policy.victims(ALL, (), 99.0) == naive.victims(ALL, set())


@given(
    changes=st.lists(st.tuples(KEYS, st.sampled_from([None, 1.0, 2.0, 3.0, -1.0, float("inf")])), max_size=150),
    asked=st.sets(st.integers(0, 150)),
)
def test_ranking_is_sorting(changes: list[tuple[str, float | None]], asked: set[int]) -> None:
    """Ranks rise and fall, keys leave and come back, and looks in between change nothing."""
    ranking, naive = Ranking(), dict[str, tuple[float, int]]()
    for number, (key, rank) in enumerate(changes):
        if rank is not None:
            ranking.set(key, number, rank)
            naive[key] = (rank, number)
        elif key in naive:
            ranking.drop(key)
            del naive[key]
        if number in asked:
            order = sorted(naive, key=naive.__getitem__)
            assert [found for found, _ in ranking.walk()] == order
            assert ranking.lowest() == (order[0] if order else None)
            assert all(ranking.nbytes(key) == naive[key][1] and ranking.rank(key) == naive[key][0] for key in order)
        assert len(ranking) == len(naive)
        assert len(ranking._heap) <= 2 * len(naive) + 16
    assert list(ranking.walk()) == [(key, naive[key][1]) for key in sorted(naive, key=naive.__getitem__)]


def test_the_ranking_forgets_places_of_what_has_left() -> None:
    ranking = Ranking()
    for number in range(1000):
        ranking.set(str(number), 1, float(number))
    for number in range(990):  # the lowest are still there, so that no place comes to the top out of date
        ranking.drop(str(999 - number))
        assert len(ranking._heap) <= 2 * len(ranking) + 16
    assert [key for key, _ in ranking.walk()] == [str(number) for number in range(10)]
