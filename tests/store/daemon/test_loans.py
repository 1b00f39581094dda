"""What is lent stays what it is, however the loan is held and whatever becomes of the connection."""

from __future__ import annotations

import gc
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.server import Daemon
from blendkv.errors import UnavailableChunkError
from blendkv.kernels import decode_vectors
from blendkv.store import KVStore
from blendkv.store.filereader import DiskReader
from blendkv.store.prefetch import LayerPrefetcher

HELD = 4096


@pytest.fixture
def kvs(make_kv):
    return [make_kv(number) for number in range(12)]


def turn_over(store, kvs):
    """Put so many others that what nothing holds has left memory."""
    for kv in kvs:
        store.put(kv)


def test_tensors_outlive_their_reader(start, connect, kvs):
    start(3 * HELD)
    one, two = connect(), connect()
    one.put(kvs[0])
    k, v = one.get(kvs[0].key, kvs[0].token_ids).layer(1)
    gc.collect()
    turn_over(two, kvs[1:])
    assert torch.equal(k, kvs[0].layer(1)[0])
    assert torch.equal(v, kvs[0].layer(1)[1])


def test_a_daemon_that_was_only_slow_keeps_what_it_lent(start_process, tmp_path, kvs, assert_same, eventually):
    """The client has given it up and connects anew; the old connection holds the loan."""
    root = tmp_path / "s"
    process = start_process(root, str(3 * HELD))
    with DaemonStore(root, 0.5) as client:
        client.put(kvs[0])
        reader = client.get(kvs[0].key, kvs[0].token_ids)
        process.kill(signal.SIGSTOP)
        assert client.get(kvs[0].key, kvs[0].token_ids) is None
        assert not client.up
        process.kill(signal.SIGCONT)
        with DaemonStore(root, 20.0) as other:
            eventually(lambda: other.daemon_stats().clients == 3)
            turn_over(other, kvs[1:])
            assert_same(reader, kvs[0])
            assert other.daemon_stats().loans == 1
            del reader
            eventually(lambda: (other.daemon_stats().loans, other.daemon_stats().clients) == (0, 2))


def test_what_a_closed_store_has_lent_is_given_back_at_its_end(start, connect, kvs, assert_same, eventually):
    daemon, other = start(3 * HELD), connect()
    client = DaemonStore(daemon.root, 20.0)
    client.put(kvs[0])
    reader = client.get(kvs[0].key, kvs[0].token_ids)
    client.close()
    turn_over(other, kvs[1:])
    assert_same(reader, kvs[0])
    assert daemon.stats().clients == 2
    del reader
    eventually(lambda: daemon.stats().clients == 1)


def test_a_client_that_takes_nothing_is_cut_off_and_keeps_its_loans(start, connect, kvs, assert_same, eventually):
    daemon, other, client = start(3 * HELD), connect(), connect()
    client.put(kvs[0])
    reader = client.get(kvs[0].key, kvs[0].token_ids)
    session = next(session for session in daemon._sessions if session.loans)
    session._cut_off()
    eventually(lambda: client.up and client.get(kvs[0].key, kvs[0].token_ids) is not None)
    turn_over(other, kvs[1:])
    assert_same(reader, kvs[0])
    del reader
    eventually(lambda: (daemon.stats().loans, daemon.stats().clients) == (0, 2))


def test_who_leaves_while_its_chunk_is_looked_for_holds_nothing(start, connect, kvs, eventually, monkeypatch, tmp_path):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        turn_over(store, kvs[:3])
    daemon, other = start(HELD), connect()
    begun, lend = [], daemon.store.lend

    def slow(key):
        begun.append(key)
        eventually(lambda: daemon.stats().clients == 1)
        return lend(key)

    with monkeypatch.context() as patch:
        patch.setattr(daemon.store, "lend", slow)
        with DaemonStore(daemon.root, 20.0) as client:
            connection = client._link.connection()
            connection._begin(_get(kvs[0].key), ())
            eventually(lambda: begun)
        eventually(lambda: daemon.store.in_memory(kvs[0].key))
    eventually(lambda: daemon.store.loading == 0)
    for kv in kvs[1:3]:  # there is room for one chunk only
        assert other.get(kv.key, kv.token_ids) is not None
        eventually(lambda kv=kv: daemon.store.in_memory(kv.key))
        eventually(lambda: daemon.stats().loans == 0)


def _get(key):
    from blendkv.daemon import messages as m

    return m.Get([bytes.fromhex(key)])


def test_memory_of_a_load_is_free_when_its_chunk_leaves(start, connect, kvs, tmp_path, eventually):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        turn_over(store, kvs)
    daemon: Daemon = start(4 * HELD)
    client = connect()
    for kv in kvs:
        client.get(kv.key, kv.token_ids).layer(1)
        eventually(lambda: daemon.stats().loans == 0)
        client.remove(kv.key)
    eventually(lambda: daemon.store.arena.free_bytes == daemon.store.arena.size)


def test_who_waits_for_a_chunk_that_is_removed_and_stored_anew(
    start, connect, kvs, assert_same, eventually, monkeypatch, tmp_path
):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        turn_over(store, kvs[:5])
    gate, begun, fill = threading.Event(), [], DiskReader.fill

    def slow(self, index, file):
        begun.append(self.key)
        assert gate.wait(60)
        fill(self, index, file)

    monkeypatch.setattr(DiskReader, "fill", slow)
    start()
    client = connect()
    others = [client.get(kv.key, kv.token_ids) for kv in kvs[1:5]]
    eventually(lambda: len(begun) == 4)  # every loading thread is busy: the next load waits
    before = client.get(kvs[0].key, kvs[0].token_ids)
    client.remove(kvs[0].key)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kvs[0])
    after = client.get(kvs[0].key, kvs[0].token_ids)
    with pytest.raises(UnavailableChunkError, match="cancelled"):
        before.layer(0)
    gate.set()
    for reader, kv in zip([after, *others], kvs, strict=False):
        assert_same(reader, kv)


def test_many_chunks_are_lent_for_one_message(make_kv, start, connect, assert_same):
    """In memory, on disk, and missing; a collision is none; the order is that of the question."""
    start(4 * HELD)
    store = connect()
    chunks = [make_kv(number) for number in range(9)]  # a page each: five of them are on disk only
    for kv in chunks[:8]:
        store.put(kv)
    asked = [(kv.key, kv.token_ids) for kv in chunks] + [(chunks[0].key, chunks[1].token_ids)]
    before = store._link.connection()._number
    found = store.get_all(asked)
    assert store._link.connection()._number == before + len(asked), "more was asked than one message with all keys"
    for kv, reader in zip(chunks[:8], found, strict=False):
        assert_same(reader, kv)
    assert found[8:] == [None, None]
    assert store.get_all([]) == []


@pytest.mark.parametrize("codec", ["raw", "int8", "turbo4"])
@pytest.mark.parametrize("dims", [((16, 8), (16, 8)), ((16, 8), (24, 40))], ids=["alike", "unlike"])
def test_layers_are_lent_as_they_are_stored(start, connect, make_kv, codec, dims):
    """A blend decodes on its way: what a prefetcher hands it lies in the shared memory, and says the same."""
    start()
    plain = make_kv(1, dims=dims)
    kv = replace(plain, recipe=replace(plain.recipe, codec=codec))
    client = connect()
    client.put(kv)
    reader = client.get(kv.key, kv.token_ids)
    shared = np.frombuffer(reader._file, np.uint8)
    first = shared.ctypes.data
    with LayerPrefetcher([reader, kv], kv.layers) as prefetcher:
        for index in range(kv.layers):
            coded, own = prefetcher.layer(index)
            assert own == kv.layer(index)
            for part in coded:
                data = part if codec == "raw" else part.data
                assert first <= data.data_ptr() < first + len(shared)
            found = decode_vectors(*coded, kv.k[0].dtype)
            for one, other in zip(found, reader.layer(index), strict=True):
                assert torch.equal(one, other)
    with pytest.raises(IndexError, match="layer 2 of a chunk KV with 2 layers"):
        reader.encoded(2)
