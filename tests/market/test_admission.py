"""The door: waits in proportion to targets, nobody starves, tenants share, refusals say when to come again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.market.admission import AdmissionQueue, AdmissionSettings, Applicant, Refusal

TARGETS = {"fast": 1.0, "slow": 10.0, "unknown": 4.0}


def queue(**knobs: object) -> AdmissionQueue:
    return AdmissionQueue(AdmissionSettings(targets=TARGETS, **knobs))  # type: ignore[arg-type]


def applicant(
    id: str, workload: str, arrived: float, tenant: str = "", cost: float = 1.0, evicts: float = 0.0
) -> Applicant:
    return Applicant(id, workload, tenant, arrived, cost, evicts)


def test_the_larger_share_of_its_target_goes_first() -> None:
    door = queue()
    door.offer(applicant("slow", "slow", 0.0))
    door.offer(applicant("fast", "fast", 8.0))
    # At 8.5: slow has waited 0.85 of its target, fast 0.5 of its own. At 9: 0.9 and 1.0.
    for now, first in ((8.5, "slow"), (9.0, "fast")):
        best = door._best(now)
        assert best is not None
        assert best[1].id == first
    assert [door.next(9.0).id, door.next(9.0).id, door.next(9.0)] == ["fast", "slow", None]  # type: ignore[union-attr]


def test_one_class_is_first_come_first_served() -> None:
    door = queue()
    for number in range(5):
        door.offer(applicant(str(number), "fast", float(number)))
    assert [door.next(10.0).id for _ in range(5)] == list("01234")  # type: ignore[union-attr]


def test_under_overload_waits_keep_their_proportion_and_nobody_starves() -> None:
    seed = 5
    rng, door, now = random.Random(seed), queue(), 0.0
    waits: dict[str, list[float]] = {"fast": [], "slow": []}
    arrived, number = 0.0, 0
    for _ in range(4000):  # one second of work each, one and a half arrivals a second
        now += 1.0
        while arrived <= now:
            door.offer(applicant(str(number), rng.choice(["fast", "slow"]), arrived))
            number, arrived = number + 1, arrived + rng.expovariate(1.5)
        served = door.next(now)
        assert served is not None
        waits[served.workload].append(now - served.arrived)
    late = {name: sum(wait[-200:]) / 200 for name, wait in waits.items()}
    assert late["slow"] / late["fast"] == pytest.approx(10.0, rel=0.15), seed
    oldest = min(waiting.arrived for waiting in door)
    assert now - oldest < 2 * late["slow"] + 30  # what still waits has not been passed over for ever


def test_a_tenant_over_its_share_waits_longer() -> None:
    door, served = queue(), {"big": 0, "small": 0}
    for number in range(200):
        door.offer(applicant(f"b{number}", "fast", 0.0, "big"))
        if number % 4 == 0:
            door.offer(applicant(f"s{number}", "fast", 0.0, "small"))
    for step in range(80):
        taken = door.next(1.0 + step)
        assert taken is not None
        served[taken.tenant] += 1
    assert served["small"] >= 30  # of 80; in the order of arrival it would be 16


def test_what_pushes_out_more_than_it_is_worth_waits_but_not_for_ever() -> None:
    door = queue()
    door.offer(applicant("flood", "fast", 0.0, "a", cost=1.0, evicts=100.0))
    door.offer(applicant("plain", "fast", 2.0, "a2"))
    waiting = next(iter(door))
    assert door.why(waiting, 3.0) == "pressure"
    # At 3: the flood has waited 3 s counted as 0.75, plain 1 s.
    assert door.next(3.0).id == "plain"  # type: ignore[union-attr]
    door.offer(applicant("later", "fast", 10.0, "a3"))
    assert door.next(11.0).id == "flood"  # type: ignore[union-attr]


def test_a_session_that_was_let_in_a_moment_ago_goes_before_a_cold_one() -> None:
    door = queue()
    for number, (session, arrived) in enumerate((("warm", 0.0), ("cold", 1.0), ("warm", 2.0))):
        door.offer(Applicant(str(number), "fast", "", arrived, 1.0, session=session))
    assert door.next(2.0).id == "0"  # type: ignore[union-attr]
    best = door._best(2.8)  # the cold one has waited 1.8 s, the warm one 0.8 s counted as 1.6
    assert best is not None
    assert best[1].id == "1"
    assert door.next(3.2).id == "2"  # type: ignore[union-attr]
    door.offer(Applicant("3", "fast", "", 4.0, 1.0, session="warm"))
    assert door.next(20.0).id == "1"  # type: ignore[union-attr]
    assert set(door._warm) == {"cold"}  # what is warm no more is forgotten


def test_expected_waits_keep_the_mean() -> None:
    door = queue(slots=2)
    for number in range(4):
        door.offer(applicant(f"f{number}", "fast", 0.0, cost=2.0))
        door.offer(applicant(f"s{number}", "slow", 0.0, cost=1.0))
    fast, slow = door.expected_wait("fast"), door.expected_wait("slow")
    assert slow == pytest.approx(10 * fast)
    # 12 seconds of work on two slots; weighted by work the mean is what first come, first served has.
    assert (8 * fast + 4 * slow) / 12 == pytest.approx(6.0)


def test_refusals_say_when_to_come_again() -> None:
    door = queue(patience=5.0, queue=3)
    assert door.offer(applicant("1", "fast", 0.0, cost=7.0)) is None
    refused = door.offer(applicant("2", "fast", 0.0, cost=7.0))
    assert refused == Refusal("overloaded", 2)
    full = queue(queue=1)
    full.offer(applicant("1", "fast", 0.0, cost=2.5))
    refused = full.offer(applicant("2", "fast", 0.0))
    assert refused == Refusal("queue_full", 3)
    assert len(full) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["in", "out", "leave"]), st.integers(0, 5), st.sampled_from(["fast", "slow", "x"]),
            st.sampled_from(["", "t1", "t2"]),
        ), max_size=60,
    )
)  # fmt: skip
def test_who_comes_in_goes_out_once(events: list[tuple[str, int, str, str]]) -> None:
    door, inside, now = queue(), [], 0.0
    for place, (what, pick, workload, tenant) in enumerate(events):
        now += 0.5
        if what == "in":
            assert door.offer(applicant(str(place), workload, now, tenant)) is None
            inside.append(str(place))
        elif what == "out":
            taken = door.next(now)
            assert (taken is None) == (not inside)
            if taken is not None:
                inside.remove(taken.id)
        elif inside:
            gone = inside.pop(pick % len(inside))
            assert door.leave(gone)
            assert not door.leave(gone)
        assert sorted(waiting.id for waiting in door) == sorted(inside)
        assert len(door) == len(inside)
        assert (door.expected_wait("fast") > 0) == bool(inside)


@pytest.mark.parametrize(
    "knobs",
    [{"slots": 0}, {"patience": -1.0}, {"queue": -1}, {"targets": {"unknown": 0.0}}, {"targets": {"fast": 1.0}}],
)
def test_impossible_settings_are_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(InputError):
        AdmissionSettings(**knobs)  # type: ignore[arg-type]
