"""ARC and LeCaR: by hand, and ARC against the paper's pseudo-code."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendkv.market.adaptive import ArcPolicy, LecarPolicy
from blendkv.market.base import NOBODY, POLICIES, EvictionPolicy, Item

ALL = 10**9


def add(policy: EvictionPolicy, *keys: str, nbytes: int = 10) -> None:
    for key in keys:
        policy.added(key, Item(nbytes, 1.0), NOBODY, 0.0)


def touch(policy: EvictionPolicy, *keys: str) -> None:
    for key in keys:
        policy.touched(key, NOBODY, 0.0)


def evict(policy: EvictionPolicy, nbytes: int) -> list[str]:
    gone = policy.victims(nbytes, (), 0.0)
    for key in gone:
        policy.removed(key, 0.0)
    return gone


def test_arc_by_hand() -> None:
    policy = ArcPolicy(40)
    add(policy, "a", "b", "c", "d")
    touch(policy, "a", "b")  # T1: c d; T2: a b; p = 0
    assert evict(policy, 10) == ["c"]  # T1 holds 20 > 0
    add(policy, "e")  # T1: d e; B1: c
    assert evict(policy, 10) == ["d"]
    add(policy, "c")  # from B1: p = 0 + 10 x max(0 / 20, 1) = 10; T1: e; T2: a b c; B1: d
    assert policy._target == 10.0
    assert evict(policy, 10) == ["a"]  # T1 holds 10, not more than p: T2 gives way
    add(policy, "a")  # from B2: p = 10 - 10 x max(10 / 10, 1) = 0; T1: e; T2: b c a
    assert policy._target == 0.0
    assert policy.victims(ALL, (), 0.0) == ["e", "b", "c", "a"]


def test_arc_learns_in_bytes() -> None:
    policy = ArcPolicy(400)
    add(policy, "big", nbytes=200)
    add(policy, "small", nbytes=50)
    touch(policy, "big")
    assert evict(policy, 50) == ["small"]  # B1: small, 50
    assert evict(policy, 50) == ["big"]  # T1 is empty; B2: big, 200
    add(policy, "small", nbytes=60)  # p = 60 x max(200 / 50, 1), a ghost's bytes being those that it left with
    assert policy._target == 240.0
    add(policy, "t1", nbytes=160)
    add(policy, "t1'", nbytes=100)  # T1 has 260 bytes; the target lets 240 stay
    assert policy.victims(1, (), 0.0) == ["t1"]
    assert policy.victims(161, (), 0.0) == ["t1", "small"]
    assert policy.victims(1, {"t1"}, 0.0) == ["t1'"]
    assert policy.victims(1, {"t1", "t1'"}, 0.0) == ["small"]


def test_arc_makes_no_ghosts_of_what_was_deleted() -> None:
    policy = ArcPolicy(40)
    add(policy, "a", "b", "c")
    assert policy.victims(10, (), 0.0) == ["a"]
    policy.removed("b", 0.0)  # deleted: not what was named
    add(policy, "b")
    assert policy._target == 0.0
    assert policy.victims(ALL, (), 0.0) == ["a", "c", "b"]  # b came back to T1


class PaperArc:
    """Megiddo and Modha, figure 4, in blocks of one size; REPLACE comes before the target moves, see `adaptive`."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[str] = []
        self.t2: list[str] = []
        self.b1: list[str] = []
        self.b2: list[str] = []

    def request(self, x: str) -> str | None:
        """Return what is evicted for a use of ``x``."""
        gone = None
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:  # case II
            gone = self.replace()
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            gone = self.replace()
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    gone = self.replace()
                else:
                    gone = self.t1.pop(0)
            elif total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                gone = self.replace()
            self.t1.append(x)
        return gone

    def replace(self) -> str:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1.append(self.t1.pop(0))
            return self.b1[-1]
        self.b2.append(self.t2.pop(0))
        return self.b2[-1]


@given(
    capacity=st.integers(1, 6),
    uses=st.lists(st.sampled_from("abcdefghijkl"), max_size=200),
    nbytes=st.sampled_from([1, 4]),
)
def test_arc_is_the_papers(capacity: int, uses: list[str], nbytes: int) -> None:
    compare(capacity, uses, nbytes)


@pytest.mark.parametrize("seed", range(5))
def test_arc_is_the_papers_for_long(seed: int) -> None:
    """Loops, scans and skewed draws in turns, so that both ghost lists fill and either is the longer one at times."""
    generator, uses = random.Random(seed), list[str]()
    for phase in range(60):
        for number in range(generator.randint(10, 80)):
            skewed, looped, scanned = int(generator.paretovariate(0.7)), number % generator.randint(9, 14), len(uses)
            uses.append(str((skewed, looped, f"scan-{scanned}")[phase % 3]))
    compare(10, uses, 4)


def compare(capacity: int, uses: list[str], nbytes: int) -> None:
    """Send uses through both, and compare what they evict, their targets and their lists."""
    policy, paper = ArcPolicy(capacity * nbytes), PaperArc(capacity)
    held: set[str] = set()
    for key in uses:
        expected = paper.request(key)
        if key in held:
            touch(policy, key)
        else:
            gone = evict(policy, nbytes) if len(held) == capacity else []
            assert gone == ([] if expected is None else [expected])
            held.difference_update(gone)
            held.add(key)
            add(policy, key, nbytes=nbytes)
        assert policy._target == paper.p * nbytes
        for ours, theirs in (
            (policy._once, paper.t1),
            (policy._often, paper.t2),
            (policy._once_ghosts, paper.b1),
            (policy._often_ghosts, paper.b2),
        ):
            assert list(ours) == theirs


def test_lecar_by_hand() -> None:
    """The first draws of seed 0 are 0.84 and 0.76: LFU, as long as LRU weighs less."""
    policy = LecarPolicy(40, seed=0)  # so that a history has room for two
    add(policy, "a")
    touch(policy, "a")
    add(policy, "b", "c")
    touch(policy, "c")  # last used: a b c; counts: a 2, b 1, c 2
    assert policy.lru_weight == 0.5
    assert evict(policy, 10) == ["b"]  # LFU's
    add(policy, "d")  # the sixth use
    assert evict(policy, 10) == ["d"]  # LFU's: counts a 2, c 2, d 1
    add(policy, "b")  # the seventh: t = 1, N = 3
    regret = 0.005 ** (1 / 3)
    assert policy.lru_weight == pytest.approx(1 / (1 + math.exp(-0.45 * regret)))  # 0.519: LFU was wrong
    assert policy._counts.rank("b") == 2  # its count went on


def test_lecar_blames_lru_as_well() -> None:
    for seed in range(20):
        policy = LecarPolicy(30, seed)
        add(policy, "a", "b", "c")
        touch(policy, "a", "a", "b")  # last used: c a b; counts: a 3, b 2, c 1
        touch(policy, "c", "c", "c")  # last used: a b c; counts: a 3, b 2, c 4
        gone = evict(policy, 10)
        by_lru = gone == ["a"]
        assert by_lru or gone == ["b"]
        add(policy, *gone)
        assert (policy.lru_weight < 0.5) == by_lru


def test_lecar_takes_turns_by_weight() -> None:
    """LRU names blocks of the first half, used twice and long ago; LFU those of the second, used once and lately."""
    policy = LecarPolicy(10**6, seed=3)
    add(policy, *(f"{number:03}" for number in range(200)))
    touch(policy, *(f"{number:03}" for number in range(200)))
    add(policy, *(f"{number:03}" for number in range(200, 400)))
    lru = sum(gone[0] < "200" for gone in (evict(policy, 10) for _ in range(100)))
    assert 35 <= lru <= 65  # 50 +- 3 sigma at equal weights
    policy._lead = math.log(9.0)
    lru = sum(gone[0] < "200" for gone in (evict(policy, 10) for _ in range(100)))
    assert lru >= 81  # 90 +- 3 sigma


def test_lecar_weights_survive_long_blame() -> None:
    """After thousands of regrets of one kind, weights are numbers, and move back."""
    policy = LecarPolicy(20, seed=0)
    policy._lead = -5000.0
    assert policy.lru_weight == 0.0
    policy._lead = 1.0
    assert policy.lru_weight == pytest.approx(1 / (1 + math.exp(-1)))


def test_lecar_forgets_what_was_deleted_and_bounds_its_histories() -> None:
    policy = LecarPolicy(100, seed=1)
    add(policy, "a", "b")
    policy.removed("a", 0.0)
    add(policy, "a")
    assert policy.lru_weight == 0.5
    generator = random.Random(1)
    for _ in range(500):
        key = str(generator.randrange(60))  # ghosts come back, too
        add(policy, key, nbytes=generator.randint(1, 30))
        evict(policy, 15)
        for history, total in zip(policy._history, policy._totals, strict=True):
            assert total == sum(gone.nbytes for gone in history.values()) <= 50


def test_names() -> None:
    assert POLICIES.get("arc") is ArcPolicy
    assert POLICIES.get("lecar") is LecarPolicy
