"""What holds for every eviction policy, whatever happens to it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.market import adaptive, classic, density, greedy, marconi, ttl
from blendkv.market import policy as own
from blendkv.market.base import POLICIES, EvictionPolicy, Item, Use
from blendkv.market.belady import BeladyCostPolicy, BeladyPolicy

MODULES = (adaptive, classic, density, greedy, marconi, own, ttl)
"""Each files its policies when it is imported."""
ALL = 10**12
CAPACITY = 400
KEYS = "abcdefghijkl"
FUTURE = [(7.0 * number % 100, KEYS[number * 5 % 11]) for number in range(60)]
"""What the offline policies believe to come; it need not be what does."""
MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    **{name: POLICIES.get(name) for name in POLICIES.names()},
    "belady": lambda capacity: BeladyPolicy(sorted(FUTURE)),
    "belady-cost": lambda capacity: BeladyCostPolicy(sorted(FUTURE)),
}
ASKS = ("belady", "belady-cost", "market")
"""Policies that do not take in every newcomer."""

each_policy = pytest.mark.parametrize("name", MAKERS)


class Event(NamedTuple):
    """Something that happens ``after`` seconds after what happened before it."""

    what: str
    key: str
    item: Item
    use: Use
    keep: frozenset[str]
    nbytes: int
    after: float


EVENTS = st.lists(
    st.builds(
        Event,
        what=st.sampled_from(["add", "add", "touch", "touch", "delete", "ask", "evict", "evict"]),
        key=st.sampled_from(KEYS),
        item=st.builds(
            Item,
            nbytes=st.integers(1, 100),
            saved=st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(0.001, 100)),
            after=st.sampled_from(["", "", *KEYS]),
        ),
        use=st.builds(
            Use,
            workload=st.sampled_from(["agent", "chat", "rag", "single", "unknown", "own"]),
            session=st.sampled_from(["", "s", "t"]),
        ),
        keep=st.frozensets(st.sampled_from(KEYS), max_size=6),
        nbytes=st.integers(-5, 300),
        after=st.sampled_from([0.0, 0.0, 0.5, 10.0, 100.0]),
    ),
    max_size=60,
)


def happen(policy: EvictionPolicy, held: dict[str, int], event: Event, now: float) -> list[str]:
    """Let ``event`` happen to a policy and to what is held; return what it names."""
    if event.what == "add":
        policy.added(event.key, event.item, event.use, now)
        held[event.key] = event.item.nbytes
    elif event.what == "touch":
        policy.touched(event.key, event.use, now)
    elif event.what == "delete":
        policy.removed(event.key, now)
        held.pop(event.key, None)
    else:
        named = policy.victims(event.nbytes, event.keep, now)
        for key in named if event.what == "evict" else ():
            policy.removed(key, now)
            held.pop(key, None)
        return named
    return []


@each_policy
@given(events=EVENTS)
@settings(deadline=None)
def test_victims_are_enough_and_no_more(name: str, events: list[Event]) -> None:
    policy, held, now = MAKERS[name](CAPACITY), dict[str, int](), 0.0
    for event in events:
        now += event.after
        before = dict(held)
        again = policy.victims(event.nbytes, event.keep, now) if event.what in ("ask", "evict") else []
        named = happen(policy, held, event, now)
        assert named == again  # asking changes nothing
        assert len(set(named)) == len(named)
        assert set(named) <= before.keys() - event.keep
        if event.what in ("ask", "evict"):
            freed = sum(before[key] for key in named)
            assert freed >= event.nbytes or set(named) == before.keys() - event.keep
            assert not named or freed - before[named[-1]] < event.nbytes
        if event.what == "ask" and name not in ASKS:
            assert policy.admits(event.key, event.item, event.use, named, now)
        assert set(policy.victims(ALL, (), now)) == held.keys()  # all that is held, nothing that has left


@each_policy
@given(events=EVENTS)
@settings(deadline=None)
def test_what_is_not_held_is_ignored(name: str, events: list[Event]) -> None:
    """One of two policies is told of uses and deletions of keys that it does not hold, ghosts among them."""
    told, untold = MAKERS[name](CAPACITY), MAKERS[name](CAPACITY)
    held, mirror, now = dict[str, int](), dict[str, int](), 0.0
    for event in events:
        now += event.after
        for key in set(KEYS) - held.keys():
            told.touched(key, event.use, now)
            told.removed(key, now)
        assert happen(told, held, event, now) == happen(untold, mirror, event, now)


@each_policy
@given(events=EVENTS)
@settings(deadline=None, max_examples=30)
def test_the_same_events_lead_to_the_same_choices(name: str, events: list[Event]) -> None:
    """Looks in between (which a live table may take at any time) make no difference either."""
    looked, other = MAKERS[name](CAPACITY), MAKERS[name](CAPACITY)
    held, mirror, now = dict[str, int](), dict[str, int](), 0.0
    for event in events:
        now += event.after
        looked.victims(event.nbytes, event.keep, now)
        assert happen(looked, held, event, now) == happen(other, mirror, event, now)


@pytest.mark.parametrize("make", [density.LhdPolicy, adaptive.LecarPolicy])
def test_chance_is_seeded(make: Callable[[int, int], EvictionPolicy]) -> None:
    def choices(seed: int) -> list[str]:
        policy, chance, gone = make(4000, seed), random.Random(5), []
        for number in range(600):
            policy.added(f"{number}", Item(10, 1.0), Use(), float(number))
            policy.touched(f"{chance.randrange(number + 1)}", Use(), float(number))
            for key in policy.victims(10, (), float(number)) if number >= 400 else ():
                policy.removed(key, float(number))
                gone.append(key)
        return gone

    assert choices(1) == choices(1)
    assert len({tuple(choices(seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "market"])  # its ghosts are bounded elsewhere
def test_memory_is_bounded_by_what_is_held(name: str) -> None:
    """40 blocks are held of many that come and go, some of them in chains, some for a second time."""
    policy, held, chance = MAKERS[name](CAPACITY), list[str](), random.Random(11)
    sizes = []
    for number in range(12_000):
        key = f"{chance.randrange(10_000):05}"
        now = float(number)
        after = held[-1] if held and chance.random() < 0.5 else ""
        if key not in held:
            held.append(key)
        policy.added(key, Item(chance.randint(5, 15), chance.random(), after), Use("agent", f"{key}"), now)
        policy.touched(chance.choice(held), Use("chat", "s"), now)
        if len(held) > 40:
            for gone in policy.victims(10, (), now):
                policy.removed(gone, now)
                held.remove(gone)
        if number % 4000 == 3999:
            sizes.append(len(pickle.dumps(policy)))
    assert max(sizes[1:]) < 1.25 * sizes[0]


@each_policy
def test_a_block_that_grows_frees_more(name: str) -> None:
    policy = MAKERS[name](CAPACITY)
    policy.added("a", Item(10, 1.0), Use(), 0.0)
    policy.added("b", Item(10, 1.0), Use(), 0.0)
    policy.added("a", Item(100, 1.0), Use(), 1.0)
    assert policy.victims(100, {"b"}, 2.0) == ["a"]
    assert set(policy.victims(101, (), 2.0)) == {"a", "b"}
    policy.added("a", Item(5, 1.0), Use(), 3.0)
    assert set(policy.victims(11, (), 4.0)) == {"a", "b"}


def test_all_are_registered() -> None:
    names = {"fifo", "lru", "lfu", "arc", "gdsf", "pgdsf", "lhd", "lecar", "marconi", "ttl", "market"}
    assert names <= set(POLICIES.names())
    assert {POLICIES.get(name).__module__ for name in names} == {module.__name__ for module in MODULES}
