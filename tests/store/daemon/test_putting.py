"""Chunks that are handed over in memory which the client can still write: the daemon keeps what it has verified."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from random import Random

import pytest

from blendkv.daemon import address, putting
from blendkv.daemon import messages as m
from blendkv.daemon import store as daemon_store
from blendkv.daemon.shm import Buffer, new_memory
from blendkv.daemon.wire import Wire, WireError
from blendkv.store.tensors import encode_chunk

PAGE = 4096


class Client:
    """Speaks for itself, whatever a well-behaved client would do."""

    def __init__(self, daemon) -> None:
        sock = address.connect(daemon.root, 20.0)
        sock.settimeout(20.0)
        self.wire = Wire(sock, m.REPLIES)
        os.close(self.ask(m.Hello(m.PROTOCOL, "test", os.getpid()))[1][0])

    def ask(self, request, *fds):
        self.wire.send(1, request, fds)
        _, reply, received = self.wire.receive()
        return reply, received

    def offer(self, size):
        buffer = Buffer.create(size)
        assert isinstance(self.ask(m.PutBuffer(), buffer.fd)[0], m.Done)
        return buffer

    def put(self, kv, size):
        return self.ask(m.PutFrom(bytes.fromhex(kv.key), size))[0]


@pytest.fixture
def raw(start):
    daemon = start()
    client = Client(daemon)
    yield daemon, client
    client.wire.close()


def test_one_buffer_serves_puts_of_all_sizes(start, connect, make_kv, assert_same):
    daemon, client = start(1 << 26), connect()
    kvs = [make_kv(number, tokens=tokens) for number, tokens in enumerate((5, 300, 7, 3))]
    sizes = []
    for kv in kvs:
        client.put(kv)
        sizes.append(next(session._buffer.size for session in daemon._sessions if session._buffer))
    files = [len(encode_chunk(kv)) for kv in kvs]
    assert sizes == [files[0], files[1], files[1], files[1]]
    for kv in kvs:
        assert_same(client.get(kv.key, kv.token_ids), kv)
    assert client.verify().damaged == ()


def test_what_fits_in_no_buffer_goes_by_itself(start, connect, make_kv, assert_same, monkeypatch):
    daemon, client = start(1 << 26), connect()
    kvs = [make_kv(number) for number in range(3)]
    monkeypatch.setattr(putting, "BUFFER_BYTES", 10)
    client.put(kvs[0])
    monkeypatch.undo()
    with client._handover._busy:  # another put is under way
        client.put(kvs[1])
    assert all(session._buffer is None for session in daemon._sessions)
    client.put(kvs[2])
    for kv in kvs:
        assert_same(client.get(kv.key, kv.token_ids), kv)


def test_puts_of_many_threads_at_once(start, connect, make_kv, assert_same):
    start(1 << 26)
    client, kvs = connect(), [make_kv(number, tokens=50 + number) for number in range(24)]
    threads = [threading.Thread(target=lambda some=kvs[n::4]: [client.put(kv) for kv in some]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kv in kvs:
        assert_same(client.get(kv.key, kv.token_ids), kv)
    assert client.verify().damaged == ()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_altered_while_it_is_taken_is_refused_or_too_late(
    raw, connect, make_kv, assert_same, monkeypatch, when
):
    daemon, client = raw
    kv, copy = make_kv(1), daemon_store.copy_bytes
    file = encode_chunk(kv)
    buffer = client.offer(len(file))
    buffer.view()[:] = file

    def scribble(into, source):
        if when == "after":
            copy(into, source)
        buffer.view()[-3] ^= 1
        if when == "before":
            copy(into, source)

    monkeypatch.setattr(daemon_store, "copy_bytes", scribble)
    reply, store = client.put(kv, len(file)), connect()
    if when == "after":
        assert isinstance(reply, m.Done)
        assert_same(store.get(kv.key, kv.token_ids), kv)
        return
    assert reply == m.Fault("InputError", f"what was put under {kv.key[:12]} is not the file of that chunk "
                            "(checksum: v.1 was altered)")  # fmt: skip
    assert store.get(kv.key, kv.token_ids) is None
    assert daemon.store.arena.free_bytes == daemon.store.arena.size


def test_a_client_that_scribbles_all_the_time_stores_nothing_wrong(raw, connect, make_kv, assert_same):
    seed = Random().randrange(1 << 32)
    print("seed", seed)
    _, client = raw
    random, kvs, stop = Random(seed), [make_kv(number, tokens=400) for number in range(30)], threading.Event()
    files = [encode_chunk(kv) for kv in kvs]
    buffer = client.offer(max(map(len, files)))

    def scribble():
        while not stop.is_set():
            buffer.view()[random.randrange(len(files[0]))] ^= 1 << random.randrange(8)

    thread = threading.Thread(target=scribble)
    thread.start()
    for kv, file in zip(kvs, files, strict=True):
        buffer.view()[: len(file)] = file
        assert isinstance(client.put(kv, len(file)), m.Done | m.Fault)
    stop.set()
    thread.join()
    store = connect()
    for kv in kvs:
        found = store.get(kv.key, kv.token_ids)
        if found is not None:
            assert_same(found, kv)
    assert store.verify().damaged == ()


@pytest.mark.parametrize("size", [0, PAGE + 1, 1 << 40])
def test_a_put_of_more_than_the_buffer_holds_is_refused(raw, make_kv, size):
    _, client = raw
    message = f"a put of {size} bytes from a buffer of {{}}; offer a buffer that holds it"
    assert client.put(make_kv(1), size) == m.Fault("InputError", message.format(0))
    client.offer(PAGE)
    assert client.put(make_kv(1), size) == m.Fault("InputError", message.format(PAGE))


def test_only_memory_of_a_fixed_and_bounded_size_is_a_buffer(raw, make_kv, eventually):
    _, client = raw
    growing = os.memfd_create("growing", os.MFD_ALLOW_SEALING)
    os.ftruncate(growing, PAGE)
    huge = new_memory("huge", m.MOST_BUFFER + 1)
    empty = new_memory("empty", 0)
    with tempfile.TemporaryFile() as file:
        for fd, message in (
            (growing, "the size of the shared memory can change"),
            (huge, f"1 to {m.MOST_BUFFER} are allowed"),
            (empty, "shared memory of 0 bytes"),
            (file.fileno(), "not shared memory"),
        ):
            before = len(os.listdir("/proc/self/fd"))
            reply, _ = client.ask(m.PutBuffer(), fd)
            assert reply.kind == "StoreError"
            assert message in reply.message
            eventually(lambda before=before: len(os.listdir("/proc/self/fd")) <= before)
    for fd in (growing, huge, empty):
        os.close(fd)
    assert client.put(make_kv(1), 1).kind == "InputError"  # there is no buffer


def test_a_buffer_without_a_descriptor_ends_the_connection(raw):
    _, client = raw
    with pytest.raises(WireError):
        client.ask(m.PutBuffer())


def test_a_client_that_dies_in_the_middle_of_a_put_harms_nobody(start, connect, make_kv, assert_same, eventually):
    daemon, kvs = start(), [make_kv(number) for number in range(6)]
    store = connect()
    for number, kv in enumerate(kvs):
        client, file = Client(daemon), encode_chunk(kv)
        buffer = client.offer(len(file))
        buffer.view()[:] = file
        client.wire.send(1, m.PutFrom(bytes.fromhex(kv.key), len(file)))
        if number % 2:
            client.wire.socket.shutdown(socket.SHUT_RDWR)
        client.wire.close()
        buffer.view()[:] = bytes(len(file))
    eventually(lambda: daemon.stats().clients == 1)
    for kv in kvs:
        found = store.get(kv.key, kv.token_ids)
        if found is not None:
            assert_same(found, kv)
        store.put(kv)
        assert_same(store.get(kv.key, kv.token_ids), kv)
    assert store.verify().damaged == ()
