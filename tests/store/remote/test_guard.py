"""The guard's parts: the circuit's states by a clock of the test's own, and threads that are really stuck."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_chunks import chunk, read_all

from blendkv.errors import TierUnavailableError
from blendkv.store.calls import CallPool, ExpiredError, SaturatedError
from blendkv.store.circuit import CircuitBreaker
from blendkv.store.guard import GuardedTier, Limits, Operation, Outcome
from blendkv.store.objects import ObjectTier
from blendkv.store.remote import Head, open_remote
from blendkv.store.timing import LATENCY_BUCKETS


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker(failures: int = 3, chance: float = 0.0) -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    return CircuitBreaker(failures, 1.0, 10.0, clock, lambda: chance), clock


def fail(circuit: CircuitBreaker, times: int) -> list[bool]:
    return [circuit.failed() for _ in range(times)]


def test_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    circuit, clock = breaker()
    assert fail(circuit, 2) == [False, False]
    circuit.succeeded()
    assert fail(circuit, 3) == [False, False, True]
    assert (circuit.state, circuit.openings, circuit.wait_s) == ("open", 1, 1.0)
    assert circuit.admit() == "refuse"
    clock.now = 0.9
    assert circuit.admit() == "refuse"
    clock.now = 1.0
    assert [circuit.admit() for _ in range(3)] == ["probe", "refuse", "refuse"]
    assert circuit.state == "half_open"


def test_back_off_doubles_to_its_limit_and_starts_anew_after_a_real_success() -> None:
    circuit, clock = breaker()
    fail(circuit, 3)
    waits = []
    for _ in range(6):
        waits.append(circuit.wait_s)
        clock.now += circuit.wait_s
        assert circuit.admit() == "probe"
        circuit.probed(False)
    assert waits == [1, 2, 4, 8, 10, 10]
    clock.now += 10
    circuit.admit()
    circuit.probed(True)
    assert circuit.state == "closed"
    assert circuit.failed()  # on trial: one failure is enough, and the back-off goes on where it was
    assert circuit.wait_s == 10
    clock.now += 10
    circuit.admit()
    circuit.probed(True)
    circuit.succeeded()
    assert fail(circuit, 3) == [False, False, True]
    assert circuit.wait_s == 1
    assert circuit.openings == 3


def test_jitter_shortens_by_up_to_half() -> None:
    for chance in (0.0, 0.5, 1.0):
        circuit, _ = breaker(1, chance)
        circuit.failed()
        assert circuit.wait_s == 1 - chance / 2


def test_what_began_before_it_opened_changes_nothing() -> None:
    circuit, clock = breaker(1)
    circuit.failed()
    circuit.succeeded()
    assert not circuit.failed()
    circuit.probed(True)  # of an earlier opening
    assert (circuit.state, circuit.openings, circuit.wait_s) == ("open", 1, 1.0)
    clock.now = 1
    circuit.admit()
    circuit.succeeded()
    assert circuit.state == "half_open"
    circuit.probed(False)
    assert circuit.wait_s == 2  # nor did they end the doubling


@given(st.lists(st.sampled_from(["ok", "fail", "wait", "admit", "well", "ill"]), max_size=60), st.integers(1, 4))
def test_whatever_happens_it_never_stays_open(events: list[str], failures: int) -> None:
    circuit, clock = breaker(failures)
    for event in events:
        before = circuit.state
        match event:
            case "ok":
                circuit.succeeded()
            case "fail":
                circuit.failed()
            case "wait":
                clock.now += 3
            case "admit":
                assert (circuit.admit() == "go") == (before == "closed")
            case _:
                circuit.probed(event == "well")
        assert circuit.wait_s <= 10
        assert before == "closed" or event in ("admit", "well", "ill") or circuit.state == before
    clock.now += 10
    if circuit.state == "open":
        assert circuit.admit() == "probe"
    if circuit.state == "half_open":
        circuit.probed(True)
    assert circuit.admit() == "go"


def test_stuck_threads_are_bounded_and_come_back() -> None:
    pool, release, ran = CallPool("test", 3), threading.Event(), []
    for expected in (1, 2, 3):
        with pytest.raises(ExpiredError) as caught:
            pool.run(release.wait, 0.05)
        assert caught.value.started
        assert pool.stuck == expected
    threads = threading.active_count()
    for _ in range(50):
        with pytest.raises(SaturatedError):
            pool.run(lambda: ran.append(1), 5)
    assert threading.active_count() == threads
    assert not ran
    release.set()
    end = time.monotonic() + 60
    while pool.stuck:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert pool.run(lambda: 7, 60) == 7
    pool.close()


def test_a_call_that_nobody_waits_for_any_more_is_not_begun() -> None:
    pool, release, ran = CallPool("test", 1), threading.Event(), []
    first = pool.start(release.wait)
    with pytest.raises(ExpiredError) as caught:
        pool.run(lambda: ran.append(1), 0.05)
    assert not caught.value.started
    assert pool.stuck == 0  # the first one's caller still waits
    release.set()
    assert first.done.wait(60)
    assert pool.run(lambda: len(ran), 60) == 0
    pool.close()


def test_results_errors_and_many_callers() -> None:
    pool = CallPool("test", 4)
    results: list[int] = []

    def ask(number: int) -> None:
        for value in range(50):
            results.append(pool.run(lambda: number * 1000 + value, 60))  # noqa: B023
            with pytest.raises(ZeroDivisionError):
                pool.run(lambda: 1 // 0, 60)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(number * 1000 + value for number in range(12) for value in range(50))
    assert pool.stuck == 0
    pool.close()
    with pytest.raises(SaturatedError):
        pool.run(lambda: 1, 1)


def test_figures_for_metrics() -> None:
    tier = open_remote("memory://figures", environ={})
    one = chunk(random.Random(0))
    tier.head(one.key)
    one.put(tier)
    one.put(tier)
    read_all(tier, one.key)
    stat = tier.stat()
    assert stat.calls == {
        ("head", "miss"): 1, ("head", "ok"): 1, ("put", "ok"): 1, ("put", "miss"): 1, ("fetch", "ok"): 3,
    }  # fmt: skip
    assert all(op in get_args(Operation) and outcome in get_args(Outcome) for op, outcome in stat.calls)
    for operation, latency in stat.latencies.items():
        assert sum(latency.counts) == sum(n for (op, _), n in stat.calls.items() if op == operation)
        assert len(latency.counts) == len(LATENCY_BUCKETS) + 1
        assert latency.seconds > 0
    assert (stat.state, stat.openings, stat.stuck) == ("closed", 0, 0)
    tier.close()


class Broken(ObjectTier):
    """A tier with a mistake in it."""

    def head(self, key: str) -> Head | None:
        raise KeyError("a mistake")


def test_mistakes_of_a_tier_are_failures_too(caplog: pytest.LogCaptureFixture) -> None:
    inner = open_remote("memory://broken", environ={})._inner
    tier = GuardedTier(Broken("broken", inner._make, inner._folder, inner._packer), Limits(failures=2))
    for _ in range(2):
        with pytest.raises(TierUnavailableError, match="KeyError: 'a mistake'"):
            tier.head("0" * 64)
    with pytest.raises(TierUnavailableError, match="left alone"):
        tier.contains(["0" * 64])
    assert tier.stat().calls == {("head", "error"): 2, ("contains", "open"): 1}
    assert len(caplog.records) == 1
    tier.close()


class Hanging(ObjectTier):
    """A tier whose client knows no time-out."""

    answer = threading.Event()

    def contains(self, keys: Sequence[str]) -> set[str]:
        self.answer.wait()
        return super().contains(keys)


def test_a_probe_that_hangs_has_failed_and_the_next_one_closes_the_circuit() -> None:
    inner = open_remote("memory://hanging", environ={})._inner
    limits = Limits(deadline_s=0.05, failures=1, first_back_off_s=0.01, longest_back_off_s=0.01, threads=3)
    tier = GuardedTier(Hanging("hanging", inner._make, inner._folder, inner._packer), limits)

    def ask_until(done: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end
            with contextlib.suppress(TierUnavailableError):
                tier.contains(["0" * 64])
            time.sleep(0.01)

    ask_until(lambda: tier.stat().stuck == 3)  # the first call, and two probes
    assert tier.stat().openings == 1
    assert tier.stat().calls["contains", "timeout"] == 1
    tier._inner.answer.set()
    ask_until(lambda: tier.stat().calls.get(("contains", "ok"), 0) > 0 and tier.stat().stuck == 0)
    assert tier.stat().state == "closed"
    tier.close()
