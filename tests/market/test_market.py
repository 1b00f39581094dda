"""The market's policy: by hand, its properties, what hints do, and its bounds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.market.base import Item, Use
from blendkv.market.classes import Classes, WorkloadClass
from blendkv.market.policy import MarketPolicy
from blendkv.market.survival import Prior

AGENT, CHAT, RAG, SINGLE = (Use(name, f"{name}-1") for name in ("agent", "chat", "rag", "single"))
BLOCK = Item(1000, 1.0)


def market(**knobs: int | float) -> MarketPolicy:
    return MarketPolicy(10**6, **knobs)  # type: ignore[arg-type]


def price(policy: MarketPolicy, key: str) -> float:
    found = policy.price(key)
    assert found is not None
    return found


def test_one_price_by_hand() -> None:
    """A block of a class that is used again with 0.5, within the first bin for certain: priors only."""
    sure = WorkloadClass("sure", Prior(0.5, 1e-3, 0.1))
    policy = MarketPolicy(10**6, Classes((sure,)))
    policy.added("a", Item(1000, 2.0), Use("sure", "s"), 0.0)
    # P = 0.5 within 0.25 s; held 0.25 x (1 - 0.25) s in the mean; 2 s saved over 1,000 bytes.
    hazard = 20 * 0.5 / 20
    assert price(policy, "a") == pytest.approx(hazard / (0.25 * (1 - hazard / 2)) * 2.0 / 1000)


def test_before_anything_is_seen_the_classes_rank_by_their_priors() -> None:
    policy = market()
    for use in (SINGLE, CHAT, AGENT, RAG):
        policy.added(use.workload, BLOCK, use, 0.0)
    assert policy.victims(4000, (), 1.0) == ["single", "rag", "chat", "agent"]


def test_what_is_learned_overrules_the_priors() -> None:
    """Single shots that do come back, and agents that do not."""
    policy = market(refit=50)
    now = 0.0
    for number in range(600):
        now += 60.0
        for workload, again in (("single", True), ("agent", False)):
            key, use = f"{workload}{number}", Use(workload, f"{workload}{number}")
            policy.added(key, BLOCK, use, now)
            if again:
                policy.touched(key, use, now + 5.0)
    policy.added("once", BLOCK, Use("single", "new"), now)
    policy.added("loop", BLOCK, Use("agent", "new"), now)
    order = policy.victims(10**9, (), now + 1.0)
    assert order.index("loop") < order.index("once")


@pytest.mark.parametrize("field", ["saved", "nbytes"])
def test_price_is_monotone_in_value_and_size(field: str) -> None:
    prices = []
    for factor in (1, 2, 8):
        policy = market()
        item = Item(1000, float(factor)) if field == "saved" else Item(1000 * factor, 1.0)
        policy.added("a", item, CHAT, 0.0)
        prices.append(price(policy, "a"))
    assert prices == sorted(prices, reverse=field == "nbytes")
    assert len(set(prices)) == 3


def test_price_rises_with_the_sessions_and_the_rate_of_use() -> None:
    def used_every(gap: float) -> float:
        policy = market()
        for number in range(20):
            use = Use("rag", f"s{number}")
            policy.added("a", BLOCK, use, 0.0) if number == 0 else policy.touched("a", use, number * gap)
        return price(policy, "a")

    prices = [used_every(gap) for gap in (1000.0, 100.0, 10.0, 1.0)]
    assert prices == sorted(prices)
    alone = market()
    alone.added("a", BLOCK, Use("rag", "s"), 0.0)
    assert price(alone, "a") < used_every(10.0)


def test_a_block_that_many_sessions_hold_outlives_those_of_one() -> None:
    policy = market()
    for number in range(50):
        use = Use("agent", f"s{number}")
        policy.added("tools", BLOCK, use, 0.0) if number == 0 else policy.touched("tools", use, number * 2.0)
        policy.added(f"own{number}", BLOCK, use, number * 2.0)
    assert policy.victims(10**9, (), 101.0)[-1] == "tools"


def test_blocks_that_are_needed_are_worth_what_needs_them() -> None:
    """A later block of a prefix saves more per byte, and is of no use without the others: it leaves first."""
    policy = market()
    for key, saved, after in (("p2", 3.0, "p1"), ("p1", 2.0, "p0"), ("p0", 1.0, "")):  # as they are told of
        policy.added(key, Item(1000, saved, after), CHAT, 0.0)
    assert policy.victims(3000, (), 1.0) == ["p2", "p1", "p0"]
    assert price(policy, "p0") == price(policy, "p2")


def test_a_session_that_is_over_goes_first_and_one_with_a_tool_at_work_last() -> None:
    policy = market()
    uses = [Use("chat", name) for name in ("over", "quiet", "tool")]
    for use in uses:
        policy.added(use.session, BLOCK, use, 0.0)
    policy.hint("over", "session_ended", 0.0, 1.0)
    policy.hint("tool", "tool_started", 20.0, 1.0)
    assert policy.victims(3000, (), 2.0) == ["over", "quiet", "tool"]
    ended = price(policy, "over")
    policy.touched("over", uses[0], 3.0)  # it came back after all
    assert price(policy, "over") > 10 * ended


def test_a_shared_block_does_not_end_with_a_session() -> None:
    policy = market()
    policy.added("a", BLOCK, Use("chat", "x"), 0.0)
    policy.touched("a", Use("chat", "y"), 1.0)
    before = price(policy, "a")
    policy.hint("x", "session_ended", 0.0, 1.0)
    assert price(policy, "a") == before


def test_newcomers_that_are_worth_less_stay_out_and_are_remembered() -> None:
    policy = market()
    policy.added("loop", BLOCK, AGENT, 0.0)
    assert not policy.admits("shot", BLOCK, SINGLE, ["loop"], 1.0)
    assert policy.price("shot") is None
    policy.hint("agent-1", "session_ended", 0.0, 1.0)
    assert policy.admits("chat", BLOCK, CHAT, ["loop"], 2.0)
    # Asked for again and again, what stayed out is worth its place in the end.
    for turn in range(100):
        policy.touched("loop", Use("agent", f"s{turn}"), 2.0 + turn)
    answers = [
        policy.admits("shot", BLOCK, Use("single", f"s{turn}"), ["loop"], 102.0 + turn / 20) for turn in range(99)
    ]
    assert not answers[0]
    assert answers[-1]


def test_a_clock_that_goes_back_stands_still() -> None:
    policy = market()
    policy.added("a", BLOCK, CHAT, 1000.0)
    before = price(policy, "a")
    policy.touched("a", CHAT, 10.0)
    policy.added("b", BLOCK, CHAT, 10.0)
    assert policy.victims(10**6, (), 0.0) == ["a", "b"] or policy.victims(10**6, (), 0.0) == ["b", "a"]
    assert price(policy, "a") <= before * 1.5


def test_memory_is_bounded() -> None:
    policy = market(ghosts=100)
    for number in range(5000):
        policy.added(f"k{number}", BLOCK, Use("chat", f"s{number}"), float(number))
        policy.removed(f"k{number}", float(number))
    assert len(policy._ledger.entries) <= 101
    assert sum(len(ages) for lane in policy._ledger._lanes._lanes.values() for ages in lane.bins) == len(
        policy._ledger.entries
    )
    strange = market()
    for number in range(500):  # tags that nobody declared make no groups of their own
        strange.added(f"k{number}", BLOCK, Use(f"class{number}", ""), 0.0)
    assert {group.name[0] for group in strange._ledger.groups.all()} == {"unknown"}


events = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "remove", "end", "tool", "evict"]), st.integers(0, 12), st.integers(1, 5000),
        st.floats(0.0, 50.0), st.sampled_from(["agent", "chat", "rag", "single"]), st.sampled_from(["", "x", "y"]),
    ), max_size=80,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(events, st.sets(st.integers(0, 12)))
def test_victims_are_held_unpinned_and_just_enough(
    events: list[tuple[str, int, int, float, str, str]], pins: set[int]
) -> None:
    policy, held, now = market(refit=7, ghosts=5), {}, 0.0
    keep = {f"k{pin}" for pin in pins}
    for what, number, size, wait, workload, session in events:
        now += wait
        key, use = f"k{number}", Use(workload, session)
        if what == "add":
            policy.added(key, Item(size, wait, f"k{number - 1}" if number % 3 else ""), use, now)
            held[key] = size
        elif what == "touch":
            policy.touched(key, use, now)
        elif what == "remove":
            policy.removed(key, now)
            held.pop(key, None)
        elif what == "end":
            policy.hint(session, "session_ended", 0.0, now)
        elif what == "tool":
            policy.hint(session, "tool_started", wait, now)
        elif what == "evict":
            victims = policy.victims(size, keep, now)
            assert victims == policy.victims(size, keep, now)
            assert len(set(victims)) == len(victims)
            assert set(victims) <= held.keys() - keep
            freed = [held[victim] for victim in victims]
            assert sum(freed) >= size or set(victims) == held.keys() - keep
            assert not freed or sum(freed[:-1]) < size
            prices = [price(policy, victim) for victim in victims]
            # Prices within a fifth of each other count as one.
            assert all(low <= high * 1.2 + 1e-25 for low, high in pairwise(prices))
            for victim in victims:
                policy.removed(victim, now)
                del held[victim]
    assert {entry.key for entry, _ in policy._ledger.cheapest()} == held.keys()


def test_the_same_events_give_the_same_choices() -> None:
    def run() -> list[list[str]]:
        rng, policy, chosen = random.Random(3), market(refit=20), []
        for step in range(500):
            policy.added(
                f"k{rng.randrange(60)}", Item(rng.randrange(1, 900), rng.random()), rng.choice([CHAT, RAG]), step * 1.5
            )
            if step % 10 == 9:
                chosen.append(policy.victims(2000, (), step * 1.5))
                for key in chosen[-1]:
                    policy.removed(key, step * 1.5)
        return chosen

    assert run() == run()


def test_classes_of_ones_own_are_checked() -> None:
    with pytest.raises(InputError, match="twice"):
        Classes((WorkloadClass("mine", Prior(0.1, 1.0)), WorkloadClass("mine", Prior(0.2, 1.0))))
    with pytest.raises(InputError):
        WorkloadClass("", Prior(0.1, 1.0))
    with pytest.raises(InputError):
        WorkloadClass("mine", Prior(0.1, 1.0), 0.0)
    patient = Classes((WorkloadClass("agent", Prior(0.1, 5.0)),))
    assert patient.get("agent").private.reuse == 0.1  # a built-in class may be replaced
    assert patient.get("what?").name == "unknown"
