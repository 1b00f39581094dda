"""A daemon that starts again brings back what was worth most, and what was used last where it knows no prices."""

from __future__ import annotations

import logging
from random import Random

import msgspec
import pytest
import xxhash
from daemon_process import eventually
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendkv.daemon.arena import held_bytes
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.pricefile import read_prices, write_prices
from blendkv.market.base import Item, Use
from blendkv.market.context import using
from blendkv.market.policy import MarketPolicy, Standing
from blendkv.store import KVStore
from blendkv.store.opening import PRICES_NAME
from blendkv.store.tensors import encode_chunk

AGENT, SINGLE = Use("agent", "loop"), Use("single")


def room(kvs):
    return sum(held_bytes(encode_chunk(kv).nbytes) for kv in kvs)


def warmed(daemon):
    eventually(lambda: daemon._warmth._thread.is_alive() and daemon._warmth.filled and daemon.store.loading == 0)


def held(daemon, kvs):
    return [daemon.store.in_memory(kv.key) for kv in kvs]


@pytest.fixture
def again(start, connect):
    """Runs a daemon to its end, with what ``work`` does with a client of it."""

    def run(work, **options):
        daemon = start(**options)
        with connect() as client:
            work(client)
        daemon.close()

    return run


def test_the_dearest_come_back(again, start, connect, make_kv, assert_same):
    loop, shots = [make_kv(number) for number in range(4)], [make_kv(number) for number in range(10, 14)]

    def work(client):
        for kvs, use in ((loop, AGENT), (shots, SINGLE)):  # the single shots were used last
            with using(use):
                for kv in kvs:
                    client.put(kv)
                    assert client.get(kv.key, kv.token_ids) is not None

    again(work, policy="market")
    daemon = start(room(loop), policy="market", warm=True)
    warmed(daemon)
    assert held(daemon, loop) == [True] * 4
    assert daemon._warmth.brought == 4
    client = connect()
    for kv in loop:
        assert_same(client.get(kv.key, kv.token_ids), kv)
    eventually(lambda: daemon.stats().loans == 0)
    assert {price.workload for price in client.market().prices} <= {"agent", "unknown"}
    assert client.stat().tiers[0].evictions == {}


def test_what_was_used_last_comes_back_where_there_are_no_prices(again, start, make_kv, tmp_path, monkeypatch):
    kvs = [make_kv(number) for number in range(8)]

    def work(client):
        for kv in kvs:
            client.put(kv)
        for kv in kvs[:3]:
            assert client.get(kv.key, kv.token_ids) is not None

    monkeypatch.setattr("blendkv.daemon.warming._PAGE", 3)
    again(work, policy="lru")
    assert not (tmp_path / "s" / PRICES_NAME).exists()
    daemon = start(room(kvs[:4]), policy="lru", warm=True)
    warmed(daemon)
    assert held(daemon, kvs) == [True] * 3 + [False] * 4 + [True]
    daemon.store._memory.evict(1)
    assert held(daemon, kvs) == [True] * 3 + [False] * 5, "in the order of before"


def test_what_memory_did_not_hold_follows_by_its_last_use(again, start, make_kv, tmp_path):
    kvs = [make_kv(number) for number in range(6)]
    again(lambda client: client.put(kvs[0]), policy="market")
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs[1:]:
            store.put(kv)
    daemon = start(room(kvs[:3]), policy="market", warm=True)
    warmed(daemon)
    assert held(daemon, kvs) == [True, False, False, False, True, True]


def test_warming_is_no_use_and_nothing_leaves_for_it(again, start, connect, make_kv):
    kvs = [make_kv(number) for number in range(6)]

    def work(client):
        for kv in kvs:
            client.put(kv)

    again(work, policy="lru")
    daemon = start(policy="lru", warm=True)
    warmed(daemon)
    client = connect()
    assert held(daemon, kvs) == [True] * 6
    assert [info.key for info in client.ls()] == [kv.key for kv in kvs]
    stat = client.stat()
    assert (stat.tiers[0].hits, stat.tiers[1].hits, stat.tiers[0].evictions) == (0, 0, {})


def test_a_tenant_gets_no_more_than_its_quota(start, make_kv, tmp_path):
    from blendkv.store.quotas import Quotas

    tag = "ab" * 16
    kvs = [make_kv(number, tenant=tag) for number in range(4)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in (*kvs, *map(make_kv, range(10, 12))):
            store.put(kv)
    daemon = start(policy="market", warm=True, quotas=Quotas(others=room(kvs[:2])))
    warmed(daemon)
    assert sum(held(daemon, kvs)) == 2
    assert sum(held(daemon, map(make_kv, range(10, 12)))) == 2


def test_a_damaged_chunk_does_not_end_it(start, make_kv, tmp_path):
    kvs = [make_kv(number) for number in range(3)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
    next((tmp_path / "s" / "kv").rglob(f"{kvs[1].key}*")).write_bytes(b"")
    daemon = start(policy="market", warm=True)
    warmed(daemon)
    assert held(daemon, kvs) == [True, False, True]
    assert sum(daemon.stats().store.discarded.values()) == 1


def test_without_warming_memory_is_empty_and_the_prices_are_kept(again, start, make_kv, tmp_path):
    kv = make_kv(1)
    again(lambda client: client.put(kv), policy="market")
    before = (tmp_path / "s" / PRICES_NAME).read_bytes()
    daemon = start(policy="market")
    assert not daemon.store.in_memory(kv.key)
    assert (tmp_path / "s" / PRICES_NAME).read_bytes() == before


def test_prices_are_written_from_time_to_time(start, connect, make_kv, tmp_path, monkeypatch):
    monkeypatch.setattr("blendkv.daemon.warming.EVERY", 0.02)
    start(policy="market")
    client, kv = connect(), make_kv(1)
    client.put(kv)
    eventually(lambda: [chunk.key for chunk in read_prices(tmp_path / "s") or []] == [kv.key])


def test_the_dearest_are_those_that_would_leave_last():
    seed = 11
    random, policy, now = Random(seed), MarketPolicy(1 << 30), 0.0
    print("seed", seed)
    for number in range(600):
        now += random.expovariate(1.0)
        use = Use(random.choice(["agent", "chat", "rag", "single"]), f"s{random.randrange(40)}")
        policy.added(f"{random.randrange(200):064x}", Item(random.randrange(1, 9), random.random()), use, now)
        if number % 7 == 0:
            policy.removed(f"{random.randrange(200):064x}", now)
    prices = policy.prices(1000, (), now)
    for count in (1, 5, len(prices), 1000):
        found = policy.dearest(count, now)()
        assert [chunk.key for chunk in found] == [price.key for price in prices[::-1]][:count]
        by_key = {price.key: price for price in prices}
        assert all(chunk.workload == by_key[chunk.key].workload for chunk in found)
        assert all(chunk.price == pytest.approx(by_key[chunk.key].price, rel=0.25) for chunk in found)


KEYS = st.binary(min_size=32, max_size=32).map(bytes.hex)
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(
    st.lists(
        st.builds(Standing, KEYS, st.floats(0, 1e9), st.sampled_from(["agent", "single"])),
        max_size=9, unique_by=lambda chunk: chunk.key,
    )
)  # fmt: skip
def test_a_table_comes_back_the_dearest_first(tmp_path, chunks):
    write_prices(tmp_path, chunks)
    assert read_prices(tmp_path) == sorted(chunks, key=lambda chunk: -chunk.price)
    assert [path.name for path in tmp_path.iterdir()] == [PRICES_NAME]


@FUZZ
@given(st.binary(max_size=200))
def test_noise_is_no_table(tmp_path, noise):
    (tmp_path / PRICES_NAME).write_bytes(noise)
    assert read_prices(tmp_path) is None
    (tmp_path / PRICES_NAME).write_bytes(xxhash.xxh3_128_digest(noise) + noise)
    assert read_prices(tmp_path) is None


def test_an_altered_table_is_not_used(tmp_path, caplog):
    seed = 7
    random = Random(seed)
    print("seed", seed)
    write_prices(tmp_path, [Standing("ab" * 32, 1.0, "agent"), Standing("cd" * 32, 2.0, "chat")])
    whole = (tmp_path / PRICES_NAME).read_bytes()
    for _ in range(50):
        data = bytearray(whole)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        (tmp_path / PRICES_NAME).write_bytes(data)
        assert read_prices(tmp_path) is None
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 50
    for table in ([2, []], [1, [[b"\0" * 32, float("nan"), "agent"]]], [1, [[b"\0" * 31, 1.0, "agent"]]]):
        data = msgspec.msgpack.encode(table)
        (tmp_path / PRICES_NAME).write_bytes(xxhash.xxh3_128_digest(data) + data)
        assert read_prices(tmp_path) is None


def test_leftovers_of_a_crash_are_swept(tmp_path):
    (tmp_path / ".daemon.1.2.tmp").write_bytes(b"half")
    assert read_prices(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_be_written_is_said_once(start, connect, make_kv, monkeypatch, caplog):
    def full(root, chunks):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blendkv.daemon.warming.write_prices", full)
    monkeypatch.setattr("blendkv.daemon.warming.EVERY", 0.01)
    daemon = start(policy="market")
    client = connect()
    client.put(make_kv(1))
    eventually(lambda: any("prices cannot be written" in record.message for record in caplog.records))
    client.close()
    daemon.close()
    assert sum("prices cannot be written" in record.message for record in caplog.records) == 1


def test_a_daemon_as_users_start_it_is_warmed(start_process, tmp_path, make_kv, assert_same):
    kvs, root = [make_kv(number) for number in range(3)], tmp_path / "s"
    with start_process(root) as daemon, DaemonStore(root, 20.0) as client:
        for kv in kvs:
            client.put(kv)
        client.close()
        daemon.close()
    start_process(root, "64MB", "--warm")
    with DaemonStore(root, 20.0) as client:
        eventually(lambda: all(client.in_memory(kv.key) for kv in kvs))
        for kv in kvs:
            assert_same(client.get(kv.key, kv.token_ids), kv)
        assert client.stat().promoted == 3
