"""Real servers behind a bad network: nobody waits beyond the deadline, the circuit opens, and closes again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from redis_process import RedisServer
from remote_chunks import Opener, StoredChunk, chunk, read_all
from s3_process import S3Server
from toxic import ToxicProxy

from blendkv.errors import TierUnavailableError
from blendkv.store.guard import GuardedTier, Limits

LIMITS = Limits(deadline_s=0.5, put_s=0.5, failures=2, first_back_off_s=0.02, longest_back_off_s=0.2)
TEN_TIMES = 10 * LIMITS.deadline_s


@pytest.fixture(params=["redis", "s3"])
def behind(
    request: pytest.FixtureRequest, proxy: Callable[[int], ToxicProxy], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ToxicProxy]:
    """A URL, and the network before it."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        network = proxy(server.port)
        return f"redis://127.0.0.1:{network.port}", network
    s3: S3Server = request.getfixturevalue("s3_server")
    network = proxy(s3.port)
    for name, value in s3.environment(network.port).items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.bucket}/network", network


def filled(behind: tuple[str, ToxicProxy], opened: Opener, limits: Limits = LIMITS) -> tuple[GuardedTier, StoredChunk]:
    """A tier with one chunk in it, stored by somebody more patient."""
    one = chunk(random.Random(0), layers=2, size=400_000)
    one.put(opened(behind[0]))
    return opened(behind[0], limits), one


def fail_in_time(call: Callable[[], object]) -> str:
    """The call must fail, and must not take ten times the deadline; returns why it failed."""
    begun = time.monotonic()
    with pytest.raises(TierUnavailableError) as caught:
        call()
    assert time.monotonic() - begun < TEN_TIMES
    return str(caught.value)


def settle(tier: GuardedTier) -> None:
    """Wait until the calls that were left alone have ended."""
    end = time.monotonic() + 60
    while tier.stat().stuck:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("ill", ["delay", "black_hole", "reset", "bandwidth"])
def test_deadline_circuit_and_recovery(
    behind: tuple[str, ToxicProxy], opened: Opener, ill: str, until_answer: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    network = behind[1]
    tier, one = filled(behind, opened)
    head = until_answer(lambda: tier.head(one.key))
    assert head is not None
    caplog.clear()
    openings = tier.stat().openings
    if ill == "delay":
        network.delay_s = TEN_TIMES
    elif ill == "black_hole":
        network.black_hole = True
    elif ill == "reset":
        network.reset()
    else:
        network.bytes_per_s = 20_000  # a layer would take 20 s
    into = memoryview(bytearray(400_000))
    for _ in range(LIMITS.failures):
        fail_in_time(lambda: tier.fetch(head, 0, [into]))
    assert tier.stat().openings == openings + 1
    calls = tier.stat().calls
    assert calls.get(("fetch", "timeout"), 0) + calls.get(("fetch", "error"), 0) == LIMITS.failures
    network.delay_s = network.delay_s or 2 * TEN_TIMES * (ill == "bandwidth")  # so that probes fail as well
    for call in (lambda: tier.head(one.key), lambda: tier.contains([one.key]), lambda: one.put(tier)):
        assert "left alone" in fail_in_time(call)
    assert bytes(into) == bytes(400_000)
    network.heal()
    until_answer(lambda: tier.fetch(head, 0, [into]))
    assert into == one.layers[0]
    assert until_answer(lambda: read_all(tier, one.key)) == one
    warned = [record for record in caplog.records if "left alone for now" in record.message]
    assert len(warned) == tier.stat().openings - openings  # once per opening, however many calls failed


def test_a_late_answer_is_written_nowhere(behind: tuple[str, ToxicProxy], opened: Opener) -> None:
    network = behind[1]
    tier, one = filled(behind, opened, Limits(deadline_s=0.5, failures=1000))
    head = opened(behind[0]).head(one.key)
    assert head is not None
    network.bytes_per_s = 500_000  # the answer takes longer than the deadline, but it comes
    into = memoryview(bytearray(400_000))
    fail_in_time(lambda: tier.fetch(head, 0, [into]))
    network.heal()
    settle(tier)
    assert bytes(into) == bytes(400_000)
    tier.fetch(head, 0, [into])
    assert into == one.layers[0]


def test_a_dead_network_costs_nothing_once_the_circuit_is_open(behind: tuple[str, ToxicProxy], opened: Opener) -> None:
    network = behind[1]
    tier, one = filled(behind, opened, Limits(deadline_s=0.2, failures=2, first_back_off_s=60, longest_back_off_s=60))
    network.black_hole = True
    for _ in range(2):
        fail_in_time(lambda: tier.head(one.key))
    begun = time.monotonic()
    for _ in range(2000):
        with pytest.raises(TierUnavailableError):
            tier.head(one.key)
    assert time.monotonic() - begun < 2000 * 0.2 / 10  # a tenth of what waiting for them would take
    assert tier.stat().calls["head", "open"] == 2000


def test_a_put_that_is_broken_off_shows_nothing(
    behind: tuple[str, ToxicProxy], opened: Opener, until_answer: Callable[..., object]
) -> None:
    url, network = behind
    tier, patient = opened(url, LIMITS), opened(url)
    large = chunk(random.Random(1), layers=40, size=1 << 20)
    network.delay_s = 0.1
    fail_in_time(lambda: large.put(tier))
    network.reset()
    network.heal()
    settle(tier)
    assert read_all(patient, large.key) in (None, large)
    patient.delete(large.key)
    assert large.put(patient)
    assert read_all(patient, large.key, 8) == large


def test_a_hung_server_counts_as_dead(
    redis_server: RedisServer, opened: Opener, until_answer: Callable[..., object]
) -> None:
    tier, one = filled((redis_server.url, None), opened)  # type: ignore[arg-type]
    assert until_answer(lambda: read_all(tier, one.key)) == one
    redis_server.hang()
    try:
        for _ in range(LIMITS.failures):
            fail_in_time(lambda: tier.head(one.key))
        fail_in_time(lambda: one.put(tier))
    finally:
        redis_server.wake()
    assert until_answer(lambda: read_all(tier, one.key)) == one
