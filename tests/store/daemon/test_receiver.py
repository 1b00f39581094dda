"""Threads that wait on one connection read it for one another, and nobody waits for ever."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from blendkv.daemon import messages as m
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.connection import DownError
from blendkv.store import KVStore
from blendkv.store.chunkfile import token_ids_digest
from blendkv.store.filereader import DiskReader


@pytest.fixture
def slow(start, monkeypatch):
    """A daemon of which chunks that it does not have are answered when the gate opens; and how many are asked for."""
    daemon, gate, begun = start(1 << 26), threading.Event(), []
    lend = daemon.store.lend

    def wait(key):
        begun.append(key)
        assert gate.wait(60)
        return lend(key)

    monkeypatch.setattr(daemon.store, "lend", wait)
    yield daemon, gate, begun
    gate.set()


def run(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def test_who_waits_long_holds_up_nobody(slow, connect, make_kv, eventually, assert_same):
    """The slow request is the first, so its thread reads for all the others."""
    _, gate, begun = slow
    client, kvs, found = connect(), [make_kv(number) for number in range(4)], []
    for kv in kvs:
        client.put(kv)
    missing = make_kv(99)
    waiting = run(lambda: found.append(client.get(missing.key, missing.token_ids)))
    eventually(lambda: begun)
    got = []
    others = run(*(lambda kv=kv: got.extend((kv, client.get(kv.key, kv.token_ids)) for _ in range(40)) for kv in kvs))
    for thread in others:
        thread.join(60)
    assert len(got) == 160
    for kv, reader in got:
        assert_same(reader, kv)
    assert found == []
    gate.set()
    waiting[0].join(60)
    assert found == [None]


def test_many_threads_get_their_own_answers(start, connect, make_kv):
    start(1 << 26)
    client, kvs, wrong = connect(), [make_kv(number) for number in range(8)], []
    for kv in kvs:
        client.put(kv)

    def look(kv):
        found = [client.lookup([kv.key])[0] for _ in range(150)]
        wrong.extend(set(found) - {token_ids_digest(kv.token_ids)})

    for thread in run(*(lambda kv=kv: look(kv) for kv in kvs)):
        thread.join(120)
        assert not thread.is_alive()
    assert wrong == []


def test_who_gives_up_hands_the_socket_on(slow, connect, make_kv, eventually):
    """The first reads and gives up; the second, which slept, must read its own reply then."""
    _, gate, begun = slow
    connection = connect(1.0)._link.connection()
    said = []

    def ask(number, limit):
        try:
            said.append(connection.ask_any(m.Get([bytes.fromhex(make_kv(number).key)]), limit=limit)[0])
        except DownError as error:
            said.append(str(error))

    first = run(lambda: ask(1, 0.3))
    eventually(lambda: len(begun) == 1)
    second = run(lambda: ask(2, 60.0))
    eventually(lambda: len(begun) == 2)
    first[0].join(60)
    assert len(said) == 1
    assert "took longer than 0.3 s" in said[0]
    assert not connection.ended
    gate.set()
    second[0].join(60)
    assert said[1] == m.Missing()


def test_layers_are_seen_while_nobody_waits(start, connect, make_kv, tmp_path, eventually, monkeypatch):
    kv, gate, fill = make_kv(1, dims=((4, 4),) * 6), threading.Semaphore(0), DiskReader.fill
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv)

    def slow_fill(self, index, file):
        assert gate.acquire(timeout=60)
        fill(self, index, file)

    monkeypatch.setattr(DiskReader, "fill", slow_fill)
    start()
    reader = connect().get(kv.key, kv.token_ids)
    for layers in range(1, 7):
        gate.release()
        eventually(lambda layers=layers: reader._loan.ready == layers)


def test_a_late_reply_lends_nothing(slow, connect, make_kv, tmp_path, eventually):
    """Nobody asks anything after it: the receiver's own thread takes it, and gives the loan back."""
    daemon, gate, begun = slow
    kv = make_kv(1)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv)
    connection = connect(1.0)._link.connection()
    with pytest.raises(DownError, match="took longer"):
        connection.ask_any(m.Get([bytes.fromhex(kv.key)]), limit=0.0)
    assert begun
    gate.set()
    eventually(lambda: daemon.store.in_memory(kv.key))
    eventually(lambda: daemon.stats().loans == 0)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_all_who_wait_for_a_daemon_that_is_gone_go_on(start_process, tmp_path, make_kv, number):
    root, kv, done = tmp_path / "s", make_kv(1), []
    process = start_process(root)
    with DaemonStore(root, 0.5) as client:
        client.put(kv)
        process.kill(number)
        begun = time.monotonic()
        threads = run(*[lambda: done.append(client.get(kv.key, kv.token_ids))] * 8)
        for thread in threads:
            thread.join(60)
        print(time.monotonic() - begun)
        assert done == [None] * 8
        assert not client.up
        if number == signal.SIGSTOP:
            process.kill(signal.SIGCONT)


def test_an_interrupt_of_who_reads_leaves_nobody_waiting(slow, connect, make_kv, eventually, monkeypatch):
    """The reply that it was about to pass on is lost: who waits for it must not wait for ever."""
    _, gate, begun = slow
    client, said = connect(), []
    connection, interrupted = client._link.connection(), threading.Event()

    def ask(number):
        try:
            said.append(connection.ask_any(m.Get([bytes.fromhex(make_kv(number).key)])))
        except (DownError, KeyboardInterrupt) as error:
            said.append(type(error))

    take = connection._receiver._take

    def interrupt(*message):
        if interrupted.is_set():
            return take(*message)
        interrupted.set()
        raise KeyboardInterrupt

    threads = run(lambda: ask(1))
    eventually(lambda: len(begun) == 1)
    threads += run(lambda: ask(2))
    eventually(lambda: len(begun) == 2)
    monkeypatch.setattr(connection._receiver, "_take", interrupt)
    gate.set()
    for thread in threads:
        thread.join(60)
    assert interrupted.is_set()
    assert len(said) == 2
    assert set(said) == {DownError, KeyboardInterrupt}
    eventually(lambda: client.up and client._link.connection() is not connection)
