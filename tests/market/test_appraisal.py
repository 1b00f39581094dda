"""What a policy knows of blocks that its tier does not hold."""

from __future__ import annotations

import pytest

from blendkv.errors import InputError
from blendkv.market.appraisal import Appraiser, Lot
from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.policy import MarketPolicy
from blendkv.market.worth import PREFILL_RATE, READ_RATE, Worth

AGENT, SINGLE = Use("agent", "loop"), Use("single", "shot")
BLOCK = Item(1000, 1.0)


def lot(key: str, age: float = 0.0, item: Item = BLOCK) -> Lot:
    return Lot(key, item, age)


def test_only_the_market_appraises() -> None:
    assert [name for name in POLICIES.names() if isinstance(POLICIES.get(name)(1000), Appraiser)] == ["market"]


def test_what_is_held_has_its_price_and_what_has_left_keeps_it() -> None:
    policy = MarketPolicy(10**6)
    policy.added("held", BLOCK, AGENT, 0.0)
    policy.added("gone", BLOCK, Use("agent", "other"), 0.0)
    policy.removed("gone", 0.0)
    held, gone = policy.appraise([lot("held"), lot("gone")], 0.0)
    assert held == gone == policy.price("held")
    assert policy.price("gone") is None


def test_what_never_fitted_is_known() -> None:
    policy = MarketPolicy(10**6)
    policy.seen("a", BLOCK, AGENT, 0.0)
    policy.seen("b", BLOCK, SINGLE, 0.0)
    dear, cheap = policy.appraise([lot("a"), lot("b")], 1.0)
    assert dear > cheap > 0.0
    assert policy.victims(10**6, (), 1.0) == []


def test_a_use_of_what_is_held_leaves_it_held() -> None:
    policy = MarketPolicy(10**6)
    policy.added("a", BLOCK, AGENT, 0.0)
    policy.seen("a", BLOCK, AGENT, 1.0)
    assert policy.victims(1, (), 1.0) == ["a"]


def test_a_stranger_is_untagged_and_the_longer_unused_the_cheaper() -> None:
    policy = MarketPolicy(10**6)
    policy.seen("untagged", BLOCK, Use(), 0.0)
    known, fresh, minute, day = policy.appraise(
        [lot("untagged"), *(lot(f"s{age}", age) for age in (0.0, 600.0, 86_400.0))], 0.0
    )
    assert known == fresh > minute > day > 0.0
    half = policy.appraise([lot("small", 0.0, Item(2000, 1.0))], 0.0)[0]
    assert half == pytest.approx(fresh / 2)


def test_a_clock_that_went_back_makes_nobody_older() -> None:
    assert MarketPolicy(10**6).appraise([lot("a", -5.0)], 0.0) == MarketPolicy(10**6).appraise([lot("a")], 0.0)


def test_strangers_that_would_leave_are_worth_nothing() -> None:
    policy = MarketPolicy(10**6)
    policy.seen("dear", BLOCK, AGENT, 0.0)
    assert policy.admits("new", BLOCK, SINGLE, ["never seen"], 0.0)
    assert not policy.admits("new", BLOCK, SINGLE, ["never seen", "dear"], 0.0)


def test_seconds_saved() -> None:
    assert Worth().chunk(500, 1000) == Item(1000, 500 / PREFILL_RATE - 1000 / READ_RATE)
    assert Worth.at(None) == Worth()
    assert Worth.at(100.0).chunk(50, 0).saved == 0.5
    assert Worth.at(1e12).chunk(1, 10**9).saved == 0.0  # slower to read than to compute
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"prefill_rate is .*; give a number above 0"):
            Worth.at(rate)
