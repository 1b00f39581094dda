"""Whose use it is reaches the daemon's memory; its prices and hints reach the client."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest
from daemon_process import eventually

from blendkv.daemon import messages as m
from blendkv.daemon.arena import PAGE
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.uses import MOST_CLASSES, Uses
from blendkv.errors import InputError
from blendkv.market.base import NOBODY, UNKNOWN, Use
from blendkv.market.context import using
from blendkv.store import KVStore
from blendkv.store.tensors import encode_chunk

HELD = PAGE
"""Bytes of the arena that a chunk of the tests' default size takes."""
AGENT, SINGLE = Use("agent", "loop"), Use("single")


def listed(store, count=1000):
    return {price.key: price for price in store.market(count).prices}


def price_of(store, kv):
    """Once its loan is over, which the daemon hears a moment later: what is in use is not on the list."""
    eventually(lambda: kv.key in listed(store))
    return listed(store)[kv.key]


def seen(store, kv):
    price = price_of(store, kv)
    return price.workload, price.kind


def test_the_daemon_learns_whose_put_it_is(start, connect, make_kv):
    start(policy="market")
    client, kvs = connect(), [make_kv(number) for number in range(4)]
    with using(AGENT):
        client.put(kvs[0])
    with using(Use("chat", "talk")):
        client.put_async(kvs[1])
    with using(Use("rag")):
        client.put_async(kvs[2])
    client.put_async(kvs[3])
    client.flush()
    assert [seen(client, kv) for kv in kvs] == [
        ("agent", "private"), ("chat", "private"), ("rag", "private"), (UNKNOWN, "private")
    ]  # fmt: skip


def test_the_daemon_learns_whose_get_it_is(start, connect, make_kv):
    start(policy="market")
    client, kv = connect(), make_kv(1)
    with using(AGENT):
        client.put(kv)
    with using(AGENT):
        assert client.get(kv.key, kv.token_ids) is not None
    assert seen(client, kv) == ("agent", "private")
    with using(Use("chat", "another")):
        assert client.get(kv.key, kv.token_ids) is not None
    assert price_of(client, kv).uses == 3
    assert seen(client, kv) == ("chat", "new"), "two sessions share it"


def test_a_get_from_disk_and_a_prefetch_say_it_too(start, connect, make_kv, tmp_path):
    kvs = [make_kv(number) for number in range(2)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
    start(policy="market")
    client = connect()
    with using(AGENT):
        assert client.get(kvs[0].key, kvs[0].token_ids) is not None
    with using(Use("chat", "talk")):
        assert client.prefetch([kvs[1].key]) == 1
    assert [seen(client, kv) for kv in kvs] == [("agent", "private"), ("chat", "private")]


def test_hints_reach_the_policy(start, connect, make_kv):
    start(policy="market")
    client, kv = connect(), make_kv(1)
    with using(AGENT):
        client.put(kv)
    assert client.hint("loop", "tool_started", 8.0)
    assert seen(client, kv) == ("agent", "tool")
    assert client.hint("loop", "tool_finished")
    with using(AGENT):
        assert client.get(kv.key, kv.token_ids) is not None
    assert seen(client, kv) == ("agent", "private")
    assert client.hint("loop", "session_ended")
    assert seen(client, kv) == ("agent", "ended")
    with pytest.raises(InputError, match="tool_started, tool_finished, session_ended"):
        client.hint("loop", "sleeps")


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_a_policy_that_does_not_listen_is_said(start, connect, make_kv, policy):
    start(policy=policy)
    client = connect()
    client.put(make_kv(1))
    assert not client.hint("loop", "session_ended")
    with pytest.raises(InputError, match="keeps no prices; choose market: blendkv daemon --policy market"):
        client.market()
    assert client.daemon_stats().policy == policy


def test_a_hint_that_no_daemon_hears_is_no_error(tmp_path):
    with DaemonStore(tmp_path / "s", 0.1) as client:
        assert not client.hint("loop", "session_ended")
        with pytest.raises(InputError):
            client.hint("", "session_ended")


def test_what_stays_is_not_in_the_price_list(start, connect, make_kv):
    start(policy="market")
    client, kvs = connect(), [make_kv(number) for number in range(3)]
    for kv in kvs:
        client.put(kv)
    client.pin([kvs[0].key])
    reader = client.get(kvs[1].key, kvs[1].token_ids)
    assert set(listed(client)) == {kvs[2].key}
    del reader


@pytest.mark.parametrize(("policy", "stays"), [("market", True), ("lru", False)])
def test_single_shots_do_not_push_out_a_loop(start, connect, make_kv, policy, stays):
    start(12 * HELD, policy=policy)
    client = connect()
    loop = [make_kv(number) for number in range(6)]
    for _ in range(4):
        with using(AGENT):
            for kv in loop:
                client.put(kv)
                assert client.get(kv.key, kv.token_ids) is not None
    with using(SINGLE):
        for number in range(100, 130):
            client.put(make_kv(number))
    there = [client.in_memory(kv.key) for kv in loop]
    assert all(there) if stays else not any(there)


def test_what_more_memory_would_have_saved(start, connect, make_kv):
    start(4 * HELD, policy="market")
    client, kvs = connect(), [make_kv(number) for number in range(8)]
    for kv in kvs:
        client.put(kv)
    before = client.market()
    assert (before.saved, before.gigabyte) == (0.0, 0.0)
    held = next(kv for kv in kvs if client.in_memory(kv.key))
    assert client.get(held.key, held.token_ids) is not None
    hit = client.market()
    assert hit.saved > 0.0 == hit.gigabyte
    gone = next(kv for kv in kvs if not client.in_memory(kv.key))
    assert client.get(gone.key, gone.token_ids) is not None
    after = client.market()
    assert after.saved == hit.saved
    assert after.gigabyte == pytest.approx(hit.saved), "both are of one size"
    assert [factor for factor, _ in after.grown] == [1.5, 2.0, 4.0]
    seconds = [saved for _, saved in after.grown]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(hit.saved)
    assert after.marginal == pytest.approx(3600 * after.gigabyte / after.seconds)


def test_a_store_in_this_process_has_the_same_calls(make_kv):
    kv = make_kv(1)
    with KVStore.open(None, memory_bytes=1 << 20, policy="market") as store:
        with using(AGENT):
            store.put(kv)
        assert seen(store, kv) == ("agent", "private")
        assert store.hint("loop", "session_ended")
        assert seen(store, kv) == ("agent", "ended")
        for count in (0, 1001):
            with pytest.raises(InputError, match=f"a price list of {count} chunks"):
                store.market(count)
    with KVStore.open(None, memory_bytes=1 << 20, policy="lru") as store:
        assert not store.hint("loop", "session_ended")
        with pytest.raises(InputError, match="keeps no prices"):
            store.market()


def test_no_client_makes_the_tables_of_classes_grow(start, connect, make_kv, caplog):
    daemon = start(policy="market")
    client, kv = connect(), make_kv(1)
    client.put(kv)
    for number in range(MOST_CLASSES + 20):
        with using(Use(f"class {number}")):
            assert client.get(kv.key, kv.token_ids) is not None
    with using(Use("class 0")):
        assert client.get(kv.key, kv.token_ids) is not None
    assert client.daemon_stats().strange == daemon.uses.strange == 20
    assert sum("it counts as unknown" in record.message for record in caplog.records) == 1


def test_classes_that_come_at_once_are_bounded_too():
    uses, seed = Uses(), time.time_ns() % 1000
    print("seed", seed)
    requests = [m.Get([], f"w{number}", "s") for number in range(2 * MOST_CLASSES)] * 4
    found: set[str] = set()

    def ask(number):
        order = requests[:]
        Random(seed + number).shuffle(order)
        found.update(uses.of(request).workload for request in order)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == MOST_CLASSES + 1
    assert UNKNOWN in found


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (Use(""), "workload is ''; 1 to 64 printable characters"),
        (Use("x" * 65), "1 to 64"),
        (Use("a\nb"), "workload is"),
        (Use("agent", "s" * 65), "session is"),
        (Use("agent", "\ud800"), "session is"),
    ],
)
def test_words_that_no_message_can_carry_are_refused_where_they_are_said(use, message):
    with pytest.raises(InputError, match=message), using(use):
        pytest.fail("it was taken")


def test_who_says_nothing_is_nobody():
    uses = Uses()
    assert uses.of(m.Get([])) is NOBODY
    assert uses.of(m.Ping()) is NOBODY
    assert uses.of(m.Prefetch([], 0, "", "s")) == Use(UNKNOWN, "s")
    assert uses.of(m.Put(b"", "agent", "a\nb")) == Use("agent", "")
    assert uses.of(m.Put(b"", "a\nb", "")).workload == UNKNOWN
    assert uses.strange == 1


def test_the_daemon_says_what_earns_its_bytes(start, connect, make_kv, tmp_path):
    """A full disk of a loop's chunks takes none of a single shot's, but more of the loop's."""
    kvs = [make_kv(number) for number in range(6)]
    start(HELD, disk_bytes=4 * encoded_bytes(kvs[0]), policy="market")
    client, size = connect(), encoded_bytes(kvs[0])
    with using(AGENT):
        for kv in kvs[:4]:
            client.put(kv)
    with using(Use("single", "shot")):
        assert not client.earns(kvs[4].key, 5, size)
        assert client.earns(kvs[0].key, 5, size), "it is there already"
    with using(AGENT):
        assert client.earns(kvs[5].key, 5, size)
    assert client.stat().tiers[1].refused == {"price": 1}
    with DaemonStore(tmp_path / "nobody", 20.0) as alone, using(Use("single", "shot")):
        assert alone.earns(kvs[4].key, 5, size), "nobody says no"


def encoded_bytes(kv):
    """Bytes of a chunk's file."""
    return len(encode_chunk(kv))
