"""GDSF, PGDSF, Marconi and TTL pinning: by hand."""

from __future__ import annotations

import math

import pytest

from blendkv.errors import InputError
from blendkv.market.base import NOBODY, POLICIES, EvictionPolicy, Item, Use
from blendkv.market.chains import Chains
from blendkv.market.greedy import GdsfPolicy, PgdsfPolicy
from blendkv.market.marconi import MarconiPolicy
from blendkv.market.shelves import shelf_of, worth_of
from blendkv.market.ttl import TtlPolicy

ALL = 10**9


def add(policy: EvictionPolicy, key: str, nbytes: int, saved: float, after: str = "", now: float = 0.0) -> None:
    policy.added(key, Item(nbytes, saved, after), NOBODY, now)


def touch(policy: EvictionPolicy, *keys: str) -> None:
    for key in keys:
        policy.touched(key, NOBODY, 0.0)


def order(policy: EvictionPolicy, now: float = 0.0) -> str:
    return "".join(policy.victims(ALL, (), now))


def evict(policy: EvictionPolicy, nbytes: int) -> list[str]:
    gone = policy.victims(nbytes, (), 0.0)
    for key in gone:
        policy.removed(key, 0.0)
    return gone


def test_gdsf_by_hand() -> None:
    policy = GdsfPolicy(1000)
    add(policy, "a", 100, 1.0)  # 0 + 1 x 1 / 100 = 0.01
    add(policy, "b", 100, 3.0)  # 0.03
    add(policy, "c", 50, 1.0)  # 0.02: half the bytes
    assert order(policy) == "acb"
    touch(policy, "a", "a", "a")  # 0 + 4 x 0.01 = 0.04
    assert order(policy) == "cba"
    assert evict(policy, 50) == ["c"]  # L = 0.02
    add(policy, "d", 100, 0.5)  # 0.02 + 0.005 = 0.025
    add(policy, "e", 100, 1.5)  # 0.02 + 0.015 = 0.035
    assert order(policy) == "dbea"
    touch(policy, "d")  # 0.02 + 2 x 0.005 = 0.03, as b, which was set before
    touch(policy, "b")  # 0.02 + 2 x 0.03 = 0.08
    assert order(policy) == "deab"


def test_gdsf_does_not_age_by_deletions() -> None:
    policy = GdsfPolicy(1000)
    add(policy, "a", 100, 1.0)  # 0.01
    add(policy, "b", 100, 5.0)  # 0.05
    add(policy, "c", 100, 3.0)  # 0.03
    assert policy.victims(100, (), 0.0) == ["a"]
    policy.removed("b", 0.0)
    add(policy, "d", 100, 2.0)  # 0.02; it would be 0.07 had L become b's
    assert order(policy) == "adc"


def test_gdsf_takes_loads_that_take_longer_for_worthless() -> None:
    policy = GdsfPolicy(1000)
    add(policy, "a", 100, 0.1)
    add(policy, "b", 100, -5.0)
    touch(policy, "b", "b")
    assert order(policy) == "ba"


def test_gdsf_at_a_new_size() -> None:
    policy = GdsfPolicy(1000)
    add(policy, "a", 100, 4.0)  # 0.04
    add(policy, "b", 100, 3.0)  # 0.03
    add(policy, "a", 400, 4.0)  # its second use: 2 x 0.01 = 0.02
    assert order(policy) == "ab"
    assert policy.victims(400, (), 0.0) == ["a"]


def test_pgdsf_averages_what_making_a_block_took() -> None:
    policies = (PgdsfPolicy(1000), GdsfPolicy(1000))
    for policy in policies:
        add(policy, "x", 100, 1.0)  # 0.01
        assert evict(policy, 100) == ["x"]  # the clock is at 0.01
        add(policy, "x", 100, 3.0)  # the mean of 0.01 and 0.03: 0.01 + 0.02 = 0.03; with GDSF 0.01 + 0.03 = 0.04
        add(policy, "y", 100, 2.5)  # 0.01 + 0.025 = 0.035
    assert [order(policy) for policy in policies] == ["xy", "yx"]
    touch(policies[0], "x")  # 0.01 + 2 x 0.02 = 0.05
    assert order(policies[0]) == "yx"


def test_pgdsf_evicts_the_end_of_a_prefix_first() -> None:
    policies = (PgdsfPolicy(1000), GdsfPolicy(1000))
    for policy in policies:
        add(policy, "2", 100, 3.0, after="1")  # told from the end to the begin
        add(policy, "1", 100, 2.0, after="0")
        add(policy, "0", 100, 1.0)
        add(policy, "x", 100, 2.5)
    assert [order(policy) for policy in policies] == ["x210", "01x2"]


def test_pgdsf_remembers_no_more_than_it_may() -> None:
    policy = PgdsfPolicy(1000)
    for number in range(3000):
        add(policy, str(number), 100, 1.0)
        if number >= 10:
            evict(policy, 100)
    assert len(policy._left) == 1010
    assert len(policy._made) == len(policy._held) == 10


def test_chains_lift_and_forget() -> None:
    chains = Chains()
    assert chains.lift("1'", "0", 7.0) == 7.0
    assert chains.lift("1", "0", 5.0) == 5.0  # a second branch, worth less
    assert chains.lift("0", "", 1.0) == 7.0
    chains.leave("1'")
    assert chains.lift("0", "", 1.0) == 7.0  # as long as anything needs it
    chains.leave("1")
    assert chains.lift("0", "", 1.0) == 1.0
    chains.leave("0")
    assert not chains._after
    assert not chains._lifts
    chains.lift("1", "0", 5.0)
    chains.lift("1", "other", 5.0)  # the block before it is another one
    assert chains.lift("0", "", 1.0) == 1.0
    assert chains.lift("other", "", 1.0) == 5.0


def test_shelves() -> None:
    assert worth_of(shelf_of(0.0)) == 0.0
    for power in range(-40, 10):
        assert worth_of(shelf_of(2.0**power)) == 2.0**power
        for part in (1.0, 1.1, 1.5, 1.9):
            assert math.isclose(worth_of(shelf_of(part * 2.0**power)), part * 2.0**power, rel_tol=0.0455)


def marconi(alpha: float) -> MarconiPolicy:
    """Three blocks of 64 B with powers of two for efficiency: 1/16, 1/64 and 1/32."""
    policy = MarconiPolicy(1000, alpha=alpha)
    add(policy, "a", 64, 4.0, now=100.0)
    add(policy, "b", 64, 1.0, now=106.0)
    add(policy, "c", 64, 2.0, now=110.0)
    return policy


@pytest.mark.parametrize(
    ("alpha", "now", "expected"),
    [
        # Scaled, efficiency is a 1, b 0, c (1/32 - 1/64) / (1/16 - 1/64) = 1/3. At 110 s recency is a 0, b 0.6, c 1.
        (0.0, 110.0, "abc"),
        (0.5, 110.0, "abc"),  # a 0.5; b 0.6; c 1.17
        (0.7, 110.0, "bac"),  # b 0.6; a 0.7; c 1.23
        (2.0, 110.0, "bca"),  # b 0.6; c 1.67; a 2
        # At 120 s recency is a 0, b 0.3, c 0.5.
        (0.5, 120.0, "bac"),  # b 0.3; a 0.5; c 0.67
        (1.0, 120.0, "bca"),  # b 0.3; c 0.83; a 1
    ],
)
def test_marconi_by_hand(alpha: float, now: float, expected: str) -> None:
    policy = marconi(alpha)
    assert order(policy, now) == expected
    assert policy.victims(65, {expected[0]}, now) == list(expected[1:])
    policy.touched("a", NOBODY, now)
    assert order(policy, now)[-1] == "a"  # recency 1 and the highest efficiency


def test_marconi_keeps_prefixes_whole() -> None:
    policy = MarconiPolicy(1000, alpha=10.0)
    add(policy, "1", 64, 4.0, after="0")
    add(policy, "0", 64, 1.0)
    add(policy, "x", 64, 2.0)
    assert order(policy, 1.0) == "x10"
    policy.removed("1", 1.0)
    policy.touched("0", NOBODY, 1.0)  # nothing needs it any more
    assert order(policy, 1.0) == "0x"


def test_marconi_refuses_a_negative_alpha() -> None:
    with pytest.raises(InputError, match="alpha is -1; 0 or more is allowed"):
        MarconiPolicy(1000, alpha=-1)


AGENT, CHAT = Use("agent", "s"), Use("chat", "t")


def test_ttl_by_hand() -> None:
    policy = TtlPolicy(1000, {"agent": 30.0, "chat": 60.0, "none": 0.0})
    policy.added("a", Item(10, 1.0), AGENT, 0.0)  # until 30
    policy.added("b", Item(10, 1.0), Use("none", "s"), 1.0)
    policy.added("c", Item(10, 1.0), CHAT, 2.0)  # until 62
    policy.added("d", Item(10, 1.0), Use("agent"), 3.0)  # no session: not pinned
    assert order(policy, 4.0) == "bdac"
    policy.touched("a", AGENT, 5.0)  # until 35
    policy.touched("b", NOBODY, 6.0)
    assert order(policy, 34.0) == "dbac"
    assert order(policy, 35.0) == "dabc"  # last used at 3, 5 and 6; c is pinned
    assert order(policy, 62.0) == "cdab"  # nothing is pinned
    policy.touched("c", AGENT, 63.0)  # until 93
    policy.touched("d", CHAT, 64.0)  # until 124
    policy.touched("d", NOBODY, 65.0)  # still until 124
    assert order(policy, 66.0) == "abcd"
    assert policy.victims(30, (), 66.0) == ["a", "b", "c"]  # a pin is no promise when there is nothing else


def test_ttl_does_not_shorten_a_pin() -> None:
    policy = TtlPolicy(1000, {"agent": 30.0, "chat": 60.0})
    policy.added("a", Item(10, 1.0), CHAT, 0.0)  # until 60
    policy.touched("a", AGENT, 10.0)  # 40 is sooner
    policy.added("b", Item(10, 1.0), NOBODY, 11.0)
    assert order(policy, 50.0) == "ba"
    assert order(policy, 60.0) == "ab"


@pytest.mark.parametrize("ttl", [-1.0, float("inf"), float("nan")])
def test_ttl_refuses_a_table_that_makes_no_sense(ttl: float) -> None:
    with pytest.raises(InputError, match=f"the TTL of agent is {ttl}; a finite number of seconds, 0 or more"):
        TtlPolicy(1000, {"agent": ttl})


def test_names() -> None:
    for name, made in (("gdsf", GdsfPolicy), ("pgdsf", PgdsfPolicy), ("marconi", MarconiPolicy), ("ttl", TtlPolicy)):
        assert POLICIES.get(name) is made
