"""A store that has no room for all, under the market: who is let into memory, what leaves the disk, what is stored."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendkv.daemon.arena import PAGE
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.server import Daemon
from blendkv.errors import InputError, StoreFullError
from blendkv.market.base import Use
from blendkv.market.context import using
from blendkv.store import KVStore, hand
from blendkv.store.index import Row
from blendkv.store.quotas import Quotas
from blendkv.store.tensors import encode_chunk

LOOP, SHOT = Use("agent", "loop"), Use("single", "shot")


def fill(store, kvs, use=LOOP):
    with using(use):
        for kv in kvs:
            store.put(kv)


def read(store, kv):
    """Read all layers, as an engine does; False if the chunk is not there."""
    reader = store.get(kv.key, kv.token_ids)
    for layer in range(0 if reader is None else reader.layers):
        reader.layer(layer)
    return reader is not None


def there(store, kvs):
    return [store.contains(kv.key, kv.token_ids) for kv in kvs]


def size_on_disk(kv):
    return len(encode_chunk(kv)) + 64  # the codec's JSON varies by a few bytes


@pytest.mark.parametrize("background", [False, True])
def test_what_is_worth_less_than_what_would_leave_stays_on_disk_only(tmp_path, make_kv, assert_holds, background):
    kvs = [make_kv(number) for number in range(6)]
    with KVStore.open(tmp_path / "s", memory_bytes=4 * kvs[0].nbytes) as store:
        fill(store, kvs[:4])
        with using(SHOT):
            (store.put_async if background else store.put)(kvs[4])
            assert_holds(store, kvs[4])  # from the queue of the writer, if it still waits there
            store.flush()
            assert not store.in_memory(kvs[4].key)
            assert_holds(store, kvs[4])  # somebody waits for it: it is read from disk
        assert [store.in_memory(kv.key) for kv in kvs[:5]] == [True] * 4 + [False]
        memory, disk = store.stat().tiers
        assert memory.refused["price"] >= 2  # the put, and the promotion
        assert memory.evictions == {}
        assert (disk.chunks, store.stat().promoted, store.stat().not_in_memory) == (5, 0, 0)


def test_what_is_worth_more_comes_in_from_disk(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(5)]
    with KVStore.open(tmp_path / "s", memory_bytes=4 * kvs[0].nbytes) as store:
        fill(store, kvs[4:])
        with using(SHOT):
            for kv in kvs[:4]:
                store.put(kv)
    with KVStore.open(tmp_path / "s", memory_bytes=4 * kvs[0].nbytes) as store:
        with using(SHOT):
            assert all(read(store, kv) for kv in kvs[:4])
        with using(LOOP):
            assert read(store, kvs[4])
        assert store.in_memory(kvs[4].key)
        assert store.stat().tiers[0].evictions == {"limit": 1}


def test_a_pinned_chunk_and_one_without_a_disk_behind_it_are_let_in(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(5)]
    with KVStore.open(tmp_path / "s", memory_bytes=4 * kvs[0].nbytes) as store:
        fill(store, kvs[4:])
        store.pin([kvs[4].key])
    with KVStore.open(tmp_path / "s", memory_bytes=4 * kvs[0].nbytes) as store:
        fill(store, kvs[:4])
        with using(SHOT):
            assert read(store, kvs[4])
        assert store.in_memory(kvs[4].key)
    with KVStore.open(None, memory_bytes=4 * kvs[0].nbytes) as store:
        fill(store, kvs[:4])
        fill(store, kvs[4:], SHOT)
        assert store.in_memory(kvs[4].key)


def test_what_neither_tier_would_take_is_kept_in_memory(tmp_path, make_kv, assert_holds):
    """Memory refuses it, since the disk will have it, and then the disk turns out to be full of pins."""
    kvs = [make_kv(number) for number in range(5)]
    disk = 4 * size_on_disk(kvs[0])
    with KVStore.open(tmp_path / "s", memory_bytes=4 * kvs[0].nbytes, disk_bytes=disk) as store:
        fill(store, kvs[:4])
        with store._disk.index.transaction():  # by another process: this one's memory does not know
            store._disk.index.set_pinned([kv.key for kv in kvs[:4]], True)
        with using(SHOT), pytest.raises(StoreFullError):
            store.put(kvs[4])
        assert_holds(store, kvs[4])
        assert store.in_memory(kvs[4].key)


USES = st.sampled_from([LOOP, SHOT, Use("chat", "a"), Use("rag"), Use()])
CALLS = st.lists(
    st.tuples(st.sampled_from(["put", "async", "get", "pin", "unpin"]), st.integers(0, 7), USES), max_size=40
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=CALLS, room=st.integers(0, 4))
def test_every_stored_chunk_can_be_read_and_memory_keeps_its_limit(tmp_path_factory, make_kv, calls, room):
    kvs = [make_kv(number, tokens=3 + number % 3) for number in range(8)]
    stored = set()
    with KVStore.open(tmp_path_factory.mktemp("s") / "s", memory_bytes=room * kvs[0].nbytes) as store:
        for call, number, use in calls:
            with using(use):
                if call in ("put", "async"):
                    (store.put if call == "put" else store.put_async)(kvs[number])
                    stored.add(number)
                elif call == "get":
                    assert read(store, kvs[number]) == (number in stored)
                elif number in stored:
                    (store.pin if call == "pin" else store.unpin)([kvs[number].key])
            memory = store.stat().tiers[0]
            assert memory.bytes <= memory.limit
        assert all(read(store, kvs[number]) for number in stored)


@contextmanager
def serving(root, **options):
    daemon = Daemon(root, **options)
    thread = threading.Thread(target=daemon.serve)
    thread.start()
    client = DaemonStore(root, 60.0)
    try:
        yield daemon, client
    finally:
        client.close()
        daemon.close()
        thread.join()


def test_a_daemon_refuses_puts_and_prefetches_and_lends_what_is_waited_for(tmp_path, make_kv, assert_holds):
    kvs = [make_kv(number) for number in range(6)]
    with serving(tmp_path / "s", memory_bytes=4 * PAGE) as (daemon, client):
        fill(client, kvs[:4])
        store = daemon.store
        with using(SHOT):
            client.put(kvs[4])  # through the buffer
            assert not store.in_memory(kvs[4].key)
            assert store.stat().tiers[0].refused == {"price": 1}
            assert store.prefetch([kvs[4].key], 0) == 0
            assert store.stat().tiers[0].refused == {"price": 2}
            assert [store.in_memory(kv.key) for kv in kvs[:4]] == [True] * 4
            assert_holds(client, kvs[4])
        assert store.in_memory(kvs[4].key)
        assert store.stat().tiers[0].bytes <= 4 * PAGE


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("market", True)])
def test_a_flood_of_single_shots_on_disk(tmp_path, make_kv, monkeypatch, policy, stays):
    """More of the loop's chunks than one look takes in, then more single shots than the disk holds."""
    monkeypatch.setattr(hand, "LEAST", 16)  # or it takes so long that the loop's chunks are rightly given up
    count = hand.LEAST + 8
    kvs = [make_kv(number) for number in range(4 * count)]
    loop, flood = kvs[:count], kvs[count:]
    disk = 2 * count * size_on_disk(kvs[0])
    with KVStore.open(tmp_path / "s", memory_bytes=2 * kvs[0].nbytes, disk_bytes=disk, policy=policy) as store:
        fill(store, loop)
        for number, kv in enumerate(flood):
            fill(store, [kv], Use("single", f"shot-{number}"))
        assert there(store, loop) == [stays] * count
        assert store.stat().tiers[1].bytes <= disk


def test_the_same_flood_in_a_daemon(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(24)]
    disk = 8 * size_on_disk(kvs[0])
    for policy, stays in (("lru", False), ("market", True)):
        with serving(tmp_path / policy, memory_bytes=2 * PAGE, disk_bytes=disk, policy=policy) as (_, client):
            fill(client, kvs[:4])
            for number, kv in enumerate(kvs[4:]):
                fill(client, [kv], Use("single", f"shot-{number}"))
            assert there(client, kvs[:4]) == [stays] * 4


def test_pins_and_quotas_hold_where_prices_decide(tmp_path, make_kv):
    tag = "a" * 32
    own, others = [[make_kv(number, tenant=tenant) for number in range(9)] for tenant in (tag, "")]
    quotas = Quotas({tag: 4 * size_on_disk(own[0])})
    with KVStore.open(tmp_path / "s", memory_bytes=0, quotas=quotas) as store:
        fill(store, others, SHOT)
        fill(store, own[:1], SHOT)
        store.pin([own[0].key])
        fill(store, own[1:3])
        fill(store, own[3:], SHOT)
        assert there(store, own[:3]) == [True] * 3  # the pin, and what is dearer
        assert sum(there(store, own)) == 4
        assert all(there(store, others))


def test_what_another_process_uses_counts_as_untagged_of_its_age(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(8)]
    limits = {"memory_bytes": 2 * kvs[0].nbytes, "disk_bytes": 6 * size_on_disk(kvs[0])}
    with KVStore.open(tmp_path / "s", **limits) as one, KVStore.open(tmp_path / "s", **limits) as two:
        fill(one, kvs[:2], SHOT)
        fill(two, kvs[2:4], Use())
        fill(one, kvs[4:6])
        fill(one, kvs[6:8])
        assert there(one, kvs) == [False] * 2 + [True] * 6  # not those that it does not know


def test_eviction_from_a_large_disk_reads_few_rows(tmp_path, make_kv):
    kv = make_kv(0)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        index, now, first, rows = store._disk.index, time.time(), "0" * 64, 100_000
        with index.transaction():
            index.insert(Row(first, kv.fingerprint, kv.recipe, kv.token_ids, kv.nbytes, 1000, "kv/00/none", now, now))
            same = "fingerprint, recipe, token_ids, tokens, nbytes, file_bytes, path, created, last_used, tenant"
            index._writer.execute(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
                f"INSERT INTO chunks (key, tick, {same}) SELECT printf('%064x', i), i + 1, {same} FROM n, chunks "
                "WHERE key = ?",
                (rows - 1, first),
            )
            index._writer.execute("UPDATE clock SET tick = ?", (rows,))
        assert index.count() == rows
        store._disk.limit = rows * 1000
        read = 0

        def counted(cursor, row):
            nonlocal read
            read += 1
            return row

        index._writer.row_factory = index._reader.row_factory = counted
        fill(store, [make_kv(number) for number in range(1, 11)])
        assert store.stat().tiers[1].evictions["limit"] >= 10
        assert read < 10 * 4 * hand.LEAST


def test_what_earns_its_bytes(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(8)]
    size = size_on_disk(kvs[0])
    with KVStore.open(tmp_path / "s", memory_bytes=0, disk_bytes=4 * size) as store:
        with using(SHOT):
            assert store.earns(kvs[0].key, 5, size)  # there is room
        fill(store, kvs[:4])
        for number in range(3):  # however often a single shot asks: nothing says that it is asked for again
            with using(Use("single", f"shot-{number}")):
                assert not store.earns(kvs[5 + number].key, 5, size)
        assert store.stat().tiers[1].refused == {"price": 3}
        assert there(store, kvs[:4]) == [True] * 4
        with using(LOOP):
            assert store.earns(kvs[4].key, 5, size)
        with using(SHOT):
            assert store.earns(kvs[0].key, 5, size)  # it is there already
            assert store.earns(kvs[6].key, 5, 5 * size)  # it does not fit whatever leaves, as its put will tell
    with KVStore.open(tmp_path / "s", memory_bytes=0, disk_bytes=4 * size, policy="lru") as store, using(SHOT):
        assert store.earns(kvs[5].key, 5, size)
    with KVStore.open(None, memory_bytes=4 * kvs[0].nbytes) as store:
        fill(store, kvs[:4])
        with using(SHOT):
            assert not store.earns(kvs[5].key, 5, kvs[5].nbytes)


def test_the_rate_of_prefill_decides_between_codecs(make_kv):
    """Two chunks of equal bytes: the one of more tokens is worth more, the faster the engine, the less each saves."""
    short, long = make_kv(0, tokens=4, heads=4), make_kv(1, tokens=8)
    assert short.nbytes > 0.9 * long.nbytes
    prices = {}
    for rate in (None, 1e5, 1e9):
        with KVStore.open(None, memory_bytes=1 << 20, prefill_rate=rate) as store:
            fill(store, [short, long])
            prices[rate] = [store._memory._policy.price(kv.key) for kv in (short, long)]
    assert prices[None][0] < prices[None][1]
    assert prices[None][1] > prices[1e5][1] > prices[1e9][1] == 0.0


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_makes_no_sense(rate):
    with pytest.raises(InputError, match=r"prefill_rate is .*; give a number above 0"):
        KVStore.open(None, memory_bytes=1, prefill_rate=rate)


def test_random_loads_never_exceed_the_disk(tmp_path, make_kv):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    kvs = [make_kv(number, tokens=rng.randint(3, 9)) for number in range(40)]
    limit = 12 * size_on_disk(kvs[0])
    with KVStore.open(tmp_path / "s", memory_bytes=6 * kvs[0].nbytes, disk_bytes=limit) as store:
        for _ in range(300):
            kv, use = rng.choice(kvs), Use(rng.choice(["agent", "chat", "rag", "single"]), f"s{rng.randrange(5)}")
            with using(use):
                if not read(store, kv):
                    store.put(kv)
                    assert there(store, [kv]) == [True]
            assert store.stat().tiers[1].bytes <= limit
        assert not store.verify().damaged
        assert not store.gc().repair
