"""The door: waits in proportion to targets, nobody starves, tenants share, refusals say when to come again."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.market.admission import PATIENT, AdmissionQueue, AdmissionSettings, Applicant, Refusal

TARGETS = {"fast": 1.0, "slow": 10.0, "unknown": 4.0}


def queue(**knobs: object) -> AdmissionQueue:
    return AdmissionQueue(AdmissionSettings(targets=TARGETS, **knobs))  # type: ignore[arg-type]


def applicant(
    id: str, workload: str, arrived: float, tenant: str = "", cost: float = 1.0, evicts: float = 0.0
) -> Applicant:
    return Applicant(id, workload, tenant, arrived, cost, evicts)


def test_the_larger_share_of_its_target_goes_first() -> None:
    door = queue(longest=0.0)
    door.offer(applicant("slow", "slow", 0.0))
    door.offer(applicant("fast", "fast", 8.0))
    # At 8.5: slow has waited 0.85 of its target, fast 0.5 of its own. At 9: 0.9 and 1.0.
    for now, first in ((8.5, "slow"), (9.0, "fast")):
        assert door._best(door._lines[""], now) == first
    assert [door.next(9.0).id, door.next(9.0).id, door.next(9.0)] == ["fast", "slow", None]  # type: ignore[union-attr]


def test_one_class_is_first_come_first_served() -> None:
    door = queue()
    for number in range(5):
        door.offer(applicant(str(number), "fast", float(number)))
    assert [door.next(10.0).id for _ in range(5)] == list("01234")  # type: ignore[union-attr]


def test_under_overload_waits_keep_their_proportion_and_nobody_starves() -> None:
    seed = 5
    rng, door, now = random.Random(seed), queue(longest=0.0), 0.0
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


def test_a_tenant_that_floods_the_door_delays_others_by_one_of_its_requests_at_most() -> None:
    door = queue()
    for number in range(200):
        door.offer(applicant(f"b{number}", "fast", 0.0, "big"))
    now, waits = 0.0, []
    for step in range(60):
        now += 1.0
        taken = door.next(now)
        assert taken is not None
        if taken.tenant == "small":
            waits.append(now - taken.arrived)
        if step % 4 == 0:
            door.offer(applicant(f"s{step}", "slow", now, "small"))
    assert len(waits) == 15  # every one, of whatever class
    assert max(waits) <= 2.0
    flooding = next(iter(door))
    assert (flooding.tenant, door.why(flooding, now)) == ("big", "capacity")


def test_tenants_share_the_work_and_not_the_requests() -> None:
    door, seconds = queue(), {"short": 0.0, "long": 0.0, "liar": 0.0}
    for number in range(300):
        door.offer(applicant(f"s{number}", "fast", 0.0, "short", cost=1.0))
        door.offer(applicant(f"l{number}", "fast", 0.0, "long", cost=5.0))
        door.offer(applicant(f"x{number}", "fast", 0.0, "liar", cost=1.0))  # and takes 10
    for _ in range(150):
        taken = door.next(1.0)
        assert taken is not None
        took = 10.0 if taken.tenant == "liar" else taken.cost
        door.corrected(taken.tenant, took - taken.cost)
        seconds[taken.tenant] += took
    assert max(seconds.values()) - min(seconds.values()) <= 10.0, seconds


def test_work_that_took_longer_counts_whenever_it_ends() -> None:
    door = queue()
    door.offer(applicant("long", "fast", 0.0, "a"))
    door.next(0.0)
    for number in range(5):
        door.offer(applicant(str(number), "fast", 0.0, "b"))
    while door.next(0.0) is not None:
        pass
    door.corrected("a", 100.0)  # beside those of b, in another slot
    for number in range(30):
        door.offer(applicant(f"a{number}", "fast", 1.0, "a"))
        door.offer(applicant(f"b{number}", "fast", 1.0, "b"))
    assert {door.next(1.0).tenant for _ in range(30)} == {"b"}  # type: ignore[union-attr]


def test_who_had_more_of_the_work_waits_for_its_share() -> None:
    door = queue()
    door.offer(applicant("1", "fast", 0.0, "a"))
    assert door.next(0.0).id == "1"  # type: ignore[union-attr]
    mine, other = applicant("2", "fast", 0.0, "a"), applicant("3", "fast", 0.0, "b")
    for waiting in (mine, other):
        door.offer(waiting)
    assert [door.why(waiting, 0.0) for waiting in (mine, other)] == ["share", "capacity"]


def test_idle_time_is_not_saved_up() -> None:
    door = queue()
    door.offer(applicant("early", "fast", 0.0, "idle"))
    door.next(0.0)
    for number in range(150):
        door.offer(applicant(f"b{number}", "fast", 0.0, "busy"))
    for _ in range(100):
        door.next(0.0)
    for number in range(50):
        door.offer(applicant(f"i{number}", "fast", 0.0, "idle"))
    order = [door.next(0.0).tenant for _ in range(40)]  # type: ignore[union-attr]
    assert order.count("idle") in (20, 21)
    while door.next(0.0) is not None:
        pass
    assert len(door._shares._had) <= 2


def test_what_pushes_out_more_than_it_is_worth_waits_but_not_for_ever() -> None:
    door = queue()
    door.offer(applicant("flood", "fast", 0.0, cost=1.0, evicts=100.0))
    door.offer(applicant("plain", "fast", 2.0))
    waiting = next(iter(door))
    assert door.why(waiting, 3.0) == "pressure"
    # At 3: the flood has waited 3 s counted as 0.75, plain 1 s.
    assert door.next(3.0).id == "plain"  # type: ignore[union-attr]
    door.offer(applicant("later", "fast", 10.0))
    assert door.next(11.0).id == "flood"  # type: ignore[union-attr]


def test_a_session_that_was_let_in_a_moment_ago_goes_before_a_cold_one() -> None:
    door = queue()
    for number, (session, arrived) in enumerate((("warm", 0.0), ("cold", 1.0), ("warm", 2.0))):
        door.offer(Applicant(str(number), "fast", "", arrived, 1.0, session=session))
    assert door.next(2.0).id == "0"  # type: ignore[union-attr]
    # The cold one has waited 1.8 s, the warm one 0.8 s counted as 1.6.
    assert door._best(door._lines[""], 2.8) == "1"
    assert door.next(3.2).id == "2"  # type: ignore[union-attr]
    door.offer(Applicant("3", "fast", "", 4.0, 1.0, session="warm"))
    assert door.next(20.0).id == "1"  # type: ignore[union-attr]
    assert set(door._warm) == {"cold"}  # what is warm no more is forgotten


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.floats(0.1, 4.0), st.sampled_from(["fast", "slow", "x"])), max_size=80
    ),
    longest=st.floats(0.5, 60.0),
)
def test_nobody_waits_longer_than_the_bound(arrivals: list[tuple[float, float, str]], longest: float) -> None:
    """A wait is the bound at most, and what first come, first served would make of those before, and one request."""
    door, at, coming = queue(longest=longest), 0.0, []
    for number, (gap, cost, workload) in enumerate(arrivals):
        at += gap
        coming.append(applicant(str(number), workload, at, cost=cost))
    now, in_order, most = 0.0, {}, max((a.cost for a in coming), default=0.0)
    waiting = deque(coming)
    while waiting or len(door):
        now = now if len(door) else max(now, waiting[0].arrived)
        while waiting and waiting[0].arrived <= now:
            newcomer = waiting.popleft()
            in_order[newcomer.id] = sum(other.cost for other in door)
            door.offer(newcomer)
        taken = door.next(now)
        assert taken is not None
        ahead = in_order[taken.id]
        assert now - taken.arrived <= max(longest, PATIENT * ahead) + ahead + most + 1e-6
        now += taken.cost


def test_who_has_waited_too_long_goes_in_the_order_of_arrival() -> None:
    for now, first in ((15.0, "fast"), (19.9, "fast"), (20.0, "costly"), (21.0, "costly")):
        door = queue(longest=20.0)
        door.offer(applicant("costly", "slow", 0.0, evicts=100.0))
        door.offer(applicant("fast", "fast", 0.0 + 1e-3))
        assert door._best(door._lines[""], now) == first, now


def test_what_others_are_ahead_by_fades_towards_the_bound() -> None:
    # At 15: slow has waited 1.5 of its target, fast 2.0 of its own; with a bound of 20, 1.5 / 0.25 and 2.0 / 0.9.
    for longest, first in ((0.0, "fast"), (60.0, "fast"), (20.0, "slow")):
        door = queue(longest=longest)
        door.offer(applicant("slow", "slow", 0.0))
        door.offer(applicant("fast", "fast", 13.0))
        assert door._best(door._lines[""], 15.0) == first, longest


def test_expected_waits_keep_the_mean() -> None:
    door = queue(slots=2)
    for number in range(4):
        door.offer(applicant(f"f{number}", "fast", 0.0, cost=2.0))
        door.offer(applicant(f"s{number}", "slow", 0.0, cost=1.0))
    fast, slow = door.expected_wait("fast"), door.expected_wait("slow")
    assert slow == pytest.approx(10 * fast)
    # 12 seconds of work on two slots; weighted by work the mean is what first come, first served has.
    assert (8 * fast + 4 * slow) / 12 == pytest.approx(6.0)


def test_expected_waits_end_at_the_bound_and_are_of_the_own_tenant() -> None:
    door = queue(longest=1.0)
    for number in range(12):
        door.offer(applicant(str(number), "fast", 0.0))
    assert door.expected_wait("fast") == pytest.approx(12.0)
    assert door.expected_wait("slow") == pytest.approx(PATIENT * 12 + 12)  # and not 120
    assert door.expected_wait("slow", "another") == 0.0
    door.offer(applicant("other", "fast", 0.0, "another"))
    assert door.expected_wait("fast", "another") == pytest.approx(2.0)  # every second place is the first tenant's


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
        assert any(door.expected_wait("fast", name) > 0 for name in ("", "t1", "t2")) == bool(inside)


@pytest.mark.parametrize(
    "knobs",
    [
        {"slots": 0},
        {"patience": -1.0},
        {"queue": -1},
        {"longest": -1.0},
        {"warm": 0.5},
        {"targets": {"unknown": 0.0}},
        {"targets": {"fast": 1.0}},
    ],
)
def test_impossible_settings_are_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(InputError):
        AdmissionSettings(**knobs)  # type: ignore[arg-type]
