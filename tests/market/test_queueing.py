"""Waiting for the server: worked out by hand, open and closed loops, gatekeepers, nobody lost."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import BlendKVError, InputError
from blendkv.market.admission import AdmissionSettings
from blendkv.market.base import Item, Use
from blendkv.market.costs import CostModel
from blendkv.market.doorkeeper import Doorkeeper
from blendkv.market.queueing import FirstCome, Line, Queued, QueueSettings, Waiting, simulate, waits
from blendkv.market.replay import Cache, KeepsAll
from blendkv.market.trace import Block, Request, Trace

COSTS = CostModel(linear=1.0, quadratic=0.0, load_rate=10.0, load_latency=0.0, token_bytes=1)
OPEN = QueueSettings(closed=False, decode=0.0)


def cache(capacity: int = 0) -> Cache:
    return Cache(capacity, KeepsAll(), COSTS)


def work(at: float, seconds: int, workload: str = "single", session: str = "", **more: object) -> Request:
    return Request(at, Use(workload, session), fresh=seconds, **more)  # type: ignore[arg-type]


def trace(*requests: Request) -> Trace:
    return Trace("t", requests)


def test_an_open_loop_by_hand() -> None:
    """Three come at 0, 1, 2 with 5, 1, 1 s of work: begun at 0, 5, 6; the fourth finds the server idle."""
    found = simulate(trace(work(0, 5), work(1, 1), work(2, 1), work(20, 2)), cache(), OPEN)
    assert [(s.arrived, s.began, s.first) for s in found.served] == [(0, 0, 5), (1, 5, 6), (2, 6, 7), (20, 20, 22)]
    assert [s.ttft for s in found.served] == [5, 5, 5, 2]
    assert (found.ttft(50), found.longest_wait) == (5, 4)
    assert (found.throughput, found.tokens_per_s, found.busy) == (3 / 20, 7 / 20, 7 / 20)  # until 20: the last arrival
    assert found.makespan == 22
    assert found.of("agent").ttft(99) is None
    assert found.of("agent").throughput == 0.0


def test_the_first_free_engine_takes_who_is_next() -> None:
    """Two engines: at 0 one works until 5, at 1 the other until 2, where the third begins; the fourth at 4, on it."""
    turns = trace(work(0, 5), work(1, 1), work(1, 2), work(1.5, 1), work(20, 2))
    found = simulate(turns, cache(), QueueSettings(closed=False, decode=0.0, engines=2))
    assert [s.began for s in found.served] == [0, 1, 2, 4, 20]
    assert found.busy == 9 / 20 / 2
    assert waits([r.arrival for r in turns], [5, 1, 2, 1, 2], engines=2) == [0, 0, 1, 2.5, 0]


def test_loading_is_part_of_the_wait_for_the_first_token() -> None:
    block = (Block("a", 10),)
    found = simulate(trace(Request(0, Use(), block, fresh=1), Request(50, Use(), block, fresh=1)), cache(100), OPEN)
    assert [s.ttft for s in found.served] == [11, 2]  # 1 s for loading 10 tokens, 1 s for computing one


def test_a_closed_loop_waits_for_the_answer() -> None:
    """Work of 4 s, an answer of 10 tokens in 10 s, a gap of 3 s: the next turn comes at 17, whatever the trace says."""
    turns = trace(
        work(0, 4, "chat", "s", output=10), work(1, 2, "chat", "s", gap=3.0), work(2, 1), work(30, 1, "chat", "late")
    )
    found = simulate(turns, cache(), QueueSettings(decode=1.0))
    assert [(s.request.use.session, s.arrived, s.began) for s in found.served] == [
        ("s", 0, 0), ("", 2, 4), ("s", 17, 17), ("late", 30, 30),
    ]  # fmt: skip
    faster = simulate(turns, cache(), QueueSettings(decode=1.0, load=2.0))
    assert [(s.request.use.session, s.arrived) for s in faster.served] == [("s", 0), ("", 1), ("late", 15), ("s", 17)]


class Listener(KeepsAll):
    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []

    def hint(self, session: str, what: str, ttl: float, now: float) -> None:
        self.told.append((now, what))

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        self.told.append((now, "added"))


def test_hints_come_with_the_answer_and_the_arrival_not_with_the_work() -> None:
    policy = Listener()
    made = (Block("m", 5),)
    turns = trace(
        work(0, 4, "agent", "s", output=10, hint="tool_started", ttl=9.0),
        work(1, 2, "agent", "s", gap=3.0, hint="session_ended", made=made),
        work(16, 5),  # holds the server up from 16 to 21
    )
    simulate(turns, Cache(100, policy, COSTS), QueueSettings(decode=1.0))
    assert policy.told == [(14, "tool_started"), (17, "tool_finished"), (21, "added"), (23, "session_ended")]


def test_lindley_is_the_open_loop() -> None:
    rng = random.Random(4)
    requests = [work(at, rng.randint(1, 9)) for at in sorted(rng.uniform(0, 900) for _ in range(200))]
    found = simulate(trace(*requests), cache(), OPEN)
    expected = waits([r.arrival for r in requests], [float(r.fresh) for r in requests])
    assert [s.waited for s in found.served] == pytest.approx(expected)


class LastCome(FirstCome):
    def order(self, line: Line, now: float, cache: Cache) -> int:
        return max(line)


class Refuses(FirstCome):
    """Every request the first ``times`` times that it comes."""

    def __init__(self, times: int, later: float = 10.0) -> None:
        self.times, self.later = times, later
        self.came: dict[int, int] = {}

    def admit(self, newcomer: Waiting, line: Line, now: float, cache: Cache) -> float | None:
        self.came[newcomer.number] = self.came.get(newcomer.number, 0) + 1
        return self.later if self.came[newcomer.number] <= self.times else None


def test_a_gatekeeper_decides_whose_turn_it_is() -> None:
    found = simulate(trace(*(work(n, 10) for n in range(4))), cache(), OPEN, LastCome())
    assert [s.arrived for s in found.served] == [0, 3, 2, 1]


def test_who_is_refused_comes_again_and_waits_from_the_first_time() -> None:
    found = simulate(trace(work(0, 1)), cache(), OPEN, Refuses(3))
    assert (found.refused, found.lost, found.served[0].began, found.served[0].ttft) == (3, 0, 30, 31)
    lost = simulate(trace(work(0, 1), work(2, 1)), cache(), QueueSettings(closed=False, attempts=3), Refuses(3))
    assert (lost.refused, lost.lost, lost.starved, lost.served, lost.ttft(50)) == (6, 2, 2, [], None)


def test_who_waits_too_long_counts_as_starved() -> None:
    settings = QueueSettings(closed=False, starved=12.0)
    assert simulate(trace(*(work(0, 5) for _ in range(5))), cache(), settings).starved == 2  # after 15 and 20 s


@pytest.mark.parametrize("later", [0.0, -1.0, float("inf"), float("nan")])
def test_a_refusal_says_for_how_long(later: float) -> None:
    with pytest.raises(BlendKVError, match="Refuses refuses"):
        simulate(trace(work(0, 1)), cache(), OPEN, Refuses(1, later))


class Wrong(FirstCome):
    def order(self, line: Line, now: float, cache: Cache) -> int:
        return 99


def test_a_gatekeeper_that_sends_who_is_not_there_is_an_error() -> None:
    with pytest.raises(BlendKVError, match="Wrong sends request 99"):
        simulate(trace(work(0, 1)), cache(), OPEN, Wrong())


@pytest.mark.parametrize("knobs", [{"load": 0.0}, {"decode": -1.0}, {"starved": 0.0}, {"attempts": 0}, {"engines": 0}])
def test_wrong_settings(knobs: dict[str, float]) -> None:
    with pytest.raises(InputError):
        QueueSettings(**knobs)  # type: ignore[arg-type]


def random_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    requests = []
    for number in range(60):
        session = f"s{rng.randrange(12)}" if rng.random() < 0.7 else ""
        workload = rng.choice(["agent", "chat", "rag", "single"])
        prefix = (Block(f"p{rng.randrange(4)}", 40),) if rng.random() < 0.5 else ()
        arrival = number * rng.uniform(2.0, 3.0)
        requests.append(
            Request(
                arrival,
                Use(workload, session),
                prefix,
                fresh=rng.randint(1, 5),
                output=rng.randint(0, 9),
                gap=rng.random(),
            )
        )
    return Trace("random", tuple(sorted(requests, key=lambda r: r.arrival)))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    closed=st.booleans(),
    load=st.floats(0.1, 20.0),
    door=st.sampled_from(["none", "door", "full"]),
    engines=st.integers(1, 4),
)
def test_what_always_holds(seed: int, closed: bool, load: float, door: str, engines: int) -> None:
    """Everyone is served once or lost; an engine does one thing at a time, and none idles while someone waits."""
    requests = random_trace(seed)
    keeper = {"none": None, "door": Doorkeeper(), "full": Doorkeeper(AdmissionSettings(queue=2, patience=30.0))}[door]
    found: Queued = simulate(requests, cache(120), QueueSettings(closed=closed, load=load, engines=engines), keeper)
    served = [s.request for s in found.served]
    assert len({id(r) for r in served}) == len(served)
    if door != "full":
        assert (len(served), found.refused, found.lost) == (len(requests), 0, 0)
    elif not closed:
        assert len(served) + found.lost == len(requests)
    free = [float("-inf")] * engines
    last = float("-inf")
    for at, s in enumerate(found.served):
        assert s.arrived <= s.began < s.first
        assert s.began >= max(last, free[0])
        if door != "full":
            begin = max(last, free[0], min(r.arrived for r in found.served[at:]))
            assert s.began == pytest.approx(begin)
        heapq.heapreplace(free, s.first)
        last = s.began
    if closed:
        answered: dict[str, float] = {}
        for s in found.served:
            session = s.request.use.session
            if session:
                assert s.arrived >= answered.get(session, float("-inf"))
                answered[session] = s.first + 0.012 * s.request.output


def test_the_door_shortens_the_waits_of_those_in_a_hurry_under_overload() -> None:
    rng = random.Random(7)
    requests = tuple(
        work(at, 2, rng.choice(["agent", "single"])) for at in sorted(rng.uniform(0, 400) for _ in range(300))
    )  # 600 s of work in 400 s
    plain, door = (simulate(trace(*requests), cache(), OPEN, keeper) for keeper in (None, Doorkeeper()))
    assert plain.of("agent").ttft(99) > 2 * door.of("agent").ttft(99)  # type: ignore[operator]
    assert door.throughput == pytest.approx(plain.throughput)
