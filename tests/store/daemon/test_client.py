"""A client of a daemon sees what a store in its own process would show."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from blendkv.daemon.arena import PAGE
from blendkv.daemon.opening import open_store
from blendkv.errors import InputError, StoreError, StoreFullError, UnavailableChunkError
from blendkv.store import ChunkReader, KVStore, LayerPrefetcher, LoadingReader
from blendkv.store.chunkfile import token_ids_digest
from blendkv.store.filereader import DiskReader
from blendkv.store.remote_reader import RemoteReader
from blendkv.store.tensors import encode_chunk

HELD = PAGE
"""Bytes of the arena that a chunk of the tests' default size takes."""


def test_what_one_engine_puts_another_gets(start, connect, make_kv, assert_same):
    kvs = [make_kv(number, tokens=number + 1) for number in range(5)]
    daemon, one, two = start(), connect(), connect()
    for kv in kvs[:3]:
        one.put(kv)
    one.put_async(kvs[3])
    two.put_async(kvs[4])
    one.flush()
    two.flush()
    for kv in kvs:
        reader = two.get(kv.key, kv.token_ids)
        assert isinstance(reader, ChunkReader)
        assert not isinstance(reader, LoadingReader)
        assert_same(reader, kv)
        assert one.contains(kv.key, list(kv.token_ids))
        assert one.in_memory(kv.key)
        assert np.array_equal(two.token_ids(kv.key), kv.token_ids)
    assert daemon.stats().clients == 2
    assert {info.key for info in two.ls()} == {kv.key for kv in kvs}
    assert one.index.keys() == {kv.key for kv in kvs}
    assert one.index.count() == 5
    assert {entry.key: entry.token_ids.tolist() for entry in one.index.entries([kv.key for kv in kvs])} == {
        kv.key: kv.token_ids.tolist() for kv in kvs
    }


def test_after_a_restart_chunks_come_from_disk_layer_by_layer(start, connect, make_kv, assert_same, tmp_path):
    kv = make_kv(1, tokens=50)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv)
    daemon, client = start(), connect()
    client.drop_page_cache()
    assert not client.in_memory(kv.key)
    reader = client.get(kv.key, kv.token_ids)
    assert isinstance(reader, LoadingReader)
    with LayerPrefetcher([reader], 2) as layers:
        for index in range(2):
            assert all(map(torch.equal, layers.layer(index)[0], kv.layer(index)))
    assert_same(reader, kv)
    assert not isinstance(client.get(kv.key, kv.token_ids), LoadingReader)
    assert daemon.stats().store.promoted == 1
    assert reader.bytes_read == kv.nbytes


def test_many_keys_in_one_look_up(start, connect, make_kv, monkeypatch):
    start()
    client, kvs = connect(), [make_kv(number) for number in range(7)]
    for kv in kvs[:5]:
        client.put(kv)
    keys = [kv.key for kv in reversed(kvs)]
    expected = [None, None, *(token_ids_digest(kv.token_ids) for kv in reversed(kvs[:5]))]
    assert client.lookup(keys) == expected
    monkeypatch.setattr("blendkv.daemon.messages.MOST_KEYS", 2)
    assert client.lookup(keys) == expected
    assert client.lookup([]) == []
    assert client.stat().tiers[0].hits == 0


def test_misses_and_collisions(start, connect, make_kv):
    start()
    client, kv, other = connect(), make_kv(1), make_kv(2)
    assert client.get(kv.key, kv.token_ids) is None
    assert client.token_ids(kv.key) is None
    assert not client.contains(kv.key, kv.token_ids)
    assert not client.remove(kv.key)
    client.put(kv)
    assert client.get(kv.key, other.token_ids) is None
    assert not client.contains(kv.key, other.token_ids)
    assert client.remove(kv.key)
    assert client.get(kv.key, kv.token_ids) is None


def test_a_chunk_under_a_key_that_is_not_its_own_is_refused(start, connect, make_kv):
    start()
    client, kv = connect(), make_kv(1)
    kv.__dict__["key"] = make_kv(2).key
    with pytest.raises(InputError, match="is not the file of that chunk"):
        client.put(kv)
    assert client.ls() == []


def test_pins_and_limits(start, connect, make_kv):
    kvs = [make_kv(number) for number in range(4)]
    start(2 * HELD, disk_bytes=2 * len(encode_chunk(kvs[0])) + 64, policy="lru")
    client = connect()
    client.put(kvs[0])
    client.pin([kvs[0].key])
    client.put(kvs[1])
    client.put(kvs[2])
    assert [client.contains(kv.key, kv.token_ids) for kv in kvs] == [True, False, True, False]
    client.pin([kvs[2].key])
    with pytest.raises(StoreFullError, match="pinned; raise the limit or unpin some"):
        client.put(kvs[3])
    client.put_async(kvs[3])
    with pytest.raises(StoreFullError, match="1 chunk KVs could not be stored in the background"):
        client.flush()
    with pytest.raises(InputError, match="no chunk KV"):
        client.pin(["0" * 64])
    client.unpin([kvs[0].key])
    client.put(kvs[3])
    assert client.contains(kvs[3].key, kvs[3].token_ids)


def test_memory_in_use_is_never_used_for_something_else(start, connect, make_kv, assert_same, eventually):
    kvs = [make_kv(number) for number in range(6)]
    daemon = start(3 * HELD)
    one, two = connect(), connect()
    for kv in kvs[:3]:
        one.put(kv)
    readers = [one.get(kv.key, kv.token_ids) for kv in kvs[:2]]
    for kv in kvs[3:]:
        two.put(kv)
        assert_same(two.get(kv.key, kv.token_ids), kv)
    two.remove(kvs[0].key)  # the memory stays with who uses it
    for kv in kvs[3:]:
        two.get(kv.key, kv.token_ids)
    for reader, kv in zip(readers, kvs[:2], strict=True):
        assert_same(reader, kv)
    assert daemon.stats().loans >= 2
    del reader, readers
    eventually(lambda: daemon.stats().loans == 0)
    for kv in kvs[3:]:
        two.get(kv.key, kv.token_ids)
    eventually(lambda: daemon.store.arena.free_bytes + daemon.store.stat().tiers[0].bytes == 3 * HELD)


def test_what_has_no_room_in_memory_is_read_from_its_file(start, connect, make_kv, assert_same):
    kv, big = make_kv(1), make_kv(2, tokens=2000)
    daemon, client = start(HELD), connect()
    client.put(big)
    reader = client.get(big.key, big.token_ids)
    assert isinstance(reader, LoadingReader)
    assert_same(reader, big)
    client.put(kv)
    held = client.get(kv.key, kv.token_ids)
    client.put(make_kv(3))  # in use, so nothing can be evicted for it
    assert_same(client.get(make_kv(3).key, make_kv(3).token_ids), make_kv(3))
    assert_same(held, kv)
    assert daemon.stats().store.not_in_memory >= 3


def test_damage_on_disk_is_a_miss_or_told_where_it_shows(start, connect, make_kv, tmp_path, eventually):
    kvs = [make_kv(number) for number in range(2)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
        paths = [store._disk.root / store._disk.index.row(kv.key).path for kv in kvs]
    daemon, client = start(), connect()
    os.truncate(paths[0], 40)
    data = bytearray(paths[1].read_bytes())
    data[-1] ^= 1
    paths[1].write_bytes(data)
    assert client.get(kvs[0].key, kvs[0].token_ids) is None
    reader = client.get(kvs[1].key, kvs[1].token_ids)
    with pytest.raises(UnavailableChunkError, match=r"checksum: v\.1 was altered"):
        reader.layer(1)
    eventually(lambda: not client.contains(kvs[1].key, kvs[1].token_ids))
    assert daemon.stats().store.discarded == {"truncated": 1, "checksum": 1}
    client.put(kvs[1])
    assert client.get(kvs[1].key, kvs[1].token_ids) is not None


def test_prefetch_and_cancel(start, connect, make_kv, tmp_path, eventually, monkeypatch):
    kvs = [make_kv(number) for number in range(9)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
    gate = threading.Event()
    fill, order = DiskReader.fill, []

    def slow(self, index, file):
        if index == 0:
            order.append(self.key)
        assert gate.wait(30)
        fill(self, index, file)

    monkeypatch.setattr(DiskReader, "fill", slow)
    daemon, client = start(), connect()
    keys = [kv.key for kv in kvs]
    assert client.prefetch([*keys[:4], "0" * 64], 5) == 4  # these occupy the loading threads
    eventually(lambda: len(order) == 4)
    assert client.prefetch(keys[4:7], 1) == 3
    assert client.prefetch(keys[7:8], 9) == 1
    assert client.cancel([keys[5], keys[0], "0" * 64]) == 1
    assert not client.in_memory(keys[5])
    reader = client.get(kvs[6].key, kvs[6].token_ids)  # somebody waits: it goes before all prefetches
    assert client.cancel([keys[6]]) == 0
    gate.set()
    reader.layer(1)
    eventually(lambda: daemon.stats().loading == 0)
    assert sorted(order[:4]) == sorted(keys[:4])
    assert order.index(keys[6]) < order.index(keys[4])
    assert order.index(keys[7]) < order.index(keys[4])
    assert [client.in_memory(key) for key in keys] == [number not in (5, 8) for number in range(9)]


def test_a_put_of_what_is_still_being_loaded_writes_whole_files_only(start, connect, make_kv, tmp_path, monkeypatch):
    kv, gate = make_kv(1), threading.Event()
    shared = f"file://{tmp_path}/shared"
    with KVStore.open(tmp_path / "other", memory_bytes=0, remotes=[shared]) as store:
        store.put(kv)
    fill = RemoteReader.fill

    def slow(self, index, file):
        assert gate.wait(30)
        fill(self, index, file)

    monkeypatch.setattr(RemoteReader, "fill", slow)
    start(remotes=[shared])
    client = connect()
    reader = client.get(kv.key, kv.token_ids)
    client.put(kv)
    gate.set()
    reader.layer(1)
    assert client.verify().checked == 1
    assert client.contains(kv.key, kv.token_ids)


def test_one_daemon_at_a_time(start, tmp_path):
    start()
    from blendkv.daemon.server import Daemon

    with pytest.raises(InputError, match="a daemon runs already for the store"):
        Daemon(tmp_path / "s", 1 << 20)


def test_open_store_finds_the_daemon_or_does_without(start, tmp_path, make_kv, caplog):
    kv = make_kv(1)
    with open_store(tmp_path / "s", 1 << 20) as store:
        assert isinstance(store, KVStore)
        store.put(kv)
    start()
    with open_store(tmp_path / "s", 1 << 20, disk_bytes=5) as store:
        assert not isinstance(store, KVStore)
        assert store.contains(kv.key, kv.token_ids)
        assert store.path == (tmp_path / "s").absolute()
    assert "whose own limit holds" in caplog.text


def test_a_closed_store_says_so(start, connect, make_kv):
    start()
    client, kv = connect(), make_kv(1)
    client.close()
    client.close()
    for call in (
        lambda: client.get(kv.key, kv.token_ids),
        lambda: client.put(kv),
        lambda: client.put_async(kv),
        client.flush,
        client.ls,
        client.stat,
        client.verify,
        lambda: client.index,
    ):
        with pytest.raises(StoreError, match="the store is closed; open it again"):
            call()


def test_long_messages_travel_in_memory(start, connect, make_kv):
    start(1 << 26)
    client = connect()
    kv = make_kv(1, tokens=20_000, dims=((1, 1),))
    client.put(kv)
    assert np.array_equal(client.token_ids(kv.key), kv.token_ids)  # 80 kB: more than a packet holds
    assert client.index.entries([kv.key])[0].token_ids.tolist() == kv.token_ids.tolist()
