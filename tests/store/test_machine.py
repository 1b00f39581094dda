"""A store against a dict, in this process and in a daemon: any sequence of calls, with and without limits."""

from __future__ import annotations

import base64
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from blendkv.daemon.arena import PAGE
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.server import Daemon
from blendkv.errors import StoreFullError
from blendkv.store import POLICIES, ChunkReader, KVStore
from blendkv.store.seal import KEY_VARIABLE, OVERHEAD
from blendkv.store.segments import table_bytes
from blendkv.store.tensors import encode_chunk
from blendkv.types import ChunkKV

NUMBERS = st.integers(0, 5)


class StoreMachine(RuleBasedStateMachine):
    """``disk_chunks`` limits the disk; None does not. The class attributes are set by a subclass in the test."""

    kvs: list[ChunkKV]
    memory_bytes: int
    disk_chunks: int | None
    encrypt = False
    policy = "lru"
    assert_same: Callable[[ChunkReader, ChunkKV], None]

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.model = {}  # number -> whether pinned, for all that was put and not removed
        self.open()

    def open(self):
        size = len(encode_chunk(self.kvs[0]))
        if self.encrypt:  # a table, and a nonce and a tag per segment
            segments = self.kvs[0].layers + 1
            size += table_bytes(segments) + segments * OVERHEAD
        self.open_store(None if self.disk_chunks is None else self.disk_chunks * size)
        assert not self.store.repair
        # What is in memory only (the disk was full of pins) ends with the process.
        self.model = {number: pinned for number, pinned in self.model.items() if self.on_disk(number)}

    def open_store(self, limit):
        self.store = KVStore.open(
            self.path / "s", memory_bytes=self.memory_bytes, disk_bytes=limit, policy=self.policy, encrypt=self.encrypt
        )

    def close_store(self):
        self.store.close()

    def on_disk(self, number):
        return self.store._disk.contains(self.kvs[number].key)

    def there(self, number):
        kv = self.kvs[number]
        return self.store.contains(kv.key, kv.token_ids)

    @rule(number=NUMBERS, background=st.booleans())
    def put(self, number, background):
        full = (
            self.disk_chunks is not None and sum(self.pinned_on_disk()) >= self.disk_chunks and not self.on_disk(number)
        )
        try:
            if background:
                self.store.put_async(self.kvs[number])
                self.store.flush()
            else:
                self.store.put(self.kvs[number])
            assert not full
        except StoreFullError:
            assert full
        self.model.setdefault(number, False)

    def pinned_on_disk(self):
        return [pinned and self.on_disk(number) for number, pinned in self.model.items()]

    @rule(number=NUMBERS, layers=st.lists(st.integers(0, 1), max_size=4))
    def get(self, number, layers):
        reader = self.store.get(self.kvs[number].key, self.kvs[number].token_ids)
        if number not in self.model:
            assert reader is None
        if reader is None:
            assert not self.there(number)
            return
        for layer in layers:
            reader.layer(layer)
        self.assert_same(reader, self.kvs[number])

    @rule(number=NUMBERS, how=st.sampled_from(["remove", "discard"]))
    def forget(self, number, how):
        was_there = self.there(number)
        if how == "remove":
            assert self.store.remove(self.kvs[number].key) == was_there
        else:
            self.store.discard(self.kvs[number].key, "test")
        assert not self.there(number)
        self.model.pop(number, None)

    @rule(number=NUMBERS, pinned=st.booleans())
    def pin(self, number, pinned):
        if self.there(number):
            (self.store.pin if pinned else self.store.unpin)([self.kvs[number].key])
            self.model[number] = pinned

    @rule()
    def reopen(self):
        self.close_store()
        self.open()

    @rule()
    def mend(self):
        assert not self.store.verify().damaged
        assert not self.store.gc().repair

    @invariant()
    def nothing_unknown_is_there(self):
        assert {number for number in range(6) if self.there(number)} <= self.model.keys()

    @invariant()
    def pinned_chunks_are_there(self):
        assert all(self.there(number) for number, pinned in self.model.items() if pinned)

    @precondition(lambda self: self.disk_chunks is None)
    @invariant()
    def without_a_limit_nothing_is_lost(self):
        assert all(self.there(number) for number in self.model)

    @invariant()
    def limits_hold(self):
        memory, disk = self.store.stat().tiers
        assert memory.bytes <= self.memory_bytes
        assert disk.limit is None or disk.bytes <= disk.limit
        files = list((self.path / "s" / "kv").rglob("*.*"))
        assert len(files) == disk.chunks
        assert sum(file.stat().st_size for file in files) == disk.bytes

    def teardown(self):
        self.close_store()
        shutil.rmtree(self.path)


class DaemonMachine(StoreMachine):
    """The same over a client and a daemon, which ends whenever the store is reopened."""

    def open_store(self, limit):
        self.daemon = Daemon(self.path / "s", self.memory_bytes, limit, self.policy, encrypt=self.encrypt)
        self.thread = threading.Thread(target=self.daemon.serve)
        self.thread.start()
        self.store = DaemonStore(self.path / "s", 60.0)

    def close_store(self):
        self.store.close()
        self.daemon.close()
        self.thread.join()

    def on_disk(self, number):
        return self.daemon.store.index.row(self.kvs[number].key) is not None


def run(machine, examples, **attributes):
    run_state_machine_as_test(
        type("LimitedMachine", (machine,), attributes),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.parametrize(("memory_chunks", "disk_chunks"), [(0, None), (2, None), (2, 3), (10, 2), (0, 3)])
def test_the_store_is_a_dict_with_limits(make_kv, assert_same, memory_chunks, disk_chunks):
    kvs = [make_kv(number, tokens=6) for number in range(6)]
    memory = memory_chunks * kvs[0].nbytes
    run(StoreMachine, 15, kvs=kvs, memory_bytes=memory, disk_chunks=disk_chunks, assert_same=staticmethod(assert_same))


@pytest.mark.parametrize(("memory_chunks", "disk_chunks"), [(1, None), (2, 3), (10, 2)])
def test_so_it_is_in_a_daemon(make_kv, assert_same, memory_chunks, disk_chunks):
    """A chunk of these takes a page of the daemon's memory."""
    kvs = [make_kv(number, tokens=6) for number in range(6)]
    memory = memory_chunks * PAGE
    run(DaemonMachine, 8, kvs=kvs, memory_bytes=memory, disk_chunks=disk_chunks, assert_same=staticmethod(assert_same))


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize(("machine", "memory_chunks", "disk_chunks"), [(StoreMachine, 2, 3), (DaemonMachine, 2, 3)])
def test_so_it_is_with_every_policy(make_kv, assert_same, policy, machine, memory_chunks, disk_chunks):
    kvs = [make_kv(number, tokens=6) for number in range(6)]
    memory = memory_chunks * (PAGE if machine is DaemonMachine else kvs[0].nbytes)
    more = {"kvs": kvs, "memory_bytes": memory, "disk_chunks": disk_chunks, "policy": policy}
    run(machine, 4, assert_same=staticmethod(assert_same), **more)


@pytest.mark.parametrize(("machine", "memory_chunks", "disk_chunks"), [
    (StoreMachine, 0, None), (StoreMachine, 2, 3), (DaemonMachine, 10, None), (DaemonMachine, 10, 3),
])  # fmt: skip
def test_so_it_is_encrypted(make_kv, assert_same, monkeypatch, machine, memory_chunks, disk_chunks):
    """In a daemon with memory for all: what is sealed it reads for its clients, to its memory."""
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(bytes(range(32))).decode())
    kvs = [make_kv(number, tokens=6) for number in range(6)]
    memory = memory_chunks * (PAGE if machine is DaemonMachine else kvs[0].nbytes)
    more = {"kvs": kvs, "memory_bytes": memory, "disk_chunks": disk_chunks, "encrypt": True}
    run(machine, 8, assert_same=staticmethod(assert_same), **more)
