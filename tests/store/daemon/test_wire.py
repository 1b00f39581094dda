"""Whatever a client sends, the daemon serves the others on and keeps no descriptor of it."""

from __future__ import annotations

import contextlib
import os
import socket
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendkv.daemon import address
from blendkv.daemon import messages as m
from blendkv.daemon.shm import Parcel
from blendkv.daemon.wire import PACKET, Wire, WireError

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def raw(daemon):
    sock = address.connect(daemon.root, 20.0)
    sock.settimeout(20.0)
    return sock


def greeted(daemon):
    wire = Wire(raw(daemon), m.REPLIES)
    wire.send(1, m.Hello(m.PROTOCOL, "test", os.getpid()))
    number, reply, fds = wire.receive()
    assert (number, type(reply), len(fds)) == (1, m.Welcome, 1)
    os.close(fds[0])
    return wire


def gone(sock):
    """Say that nothing more comes, and read until the daemon ends the connection; replies may come before."""
    with sock, contextlib.suppress(ConnectionError):
        with contextlib.suppress(OSError):  # it has ended it already
            sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 20):
            pass


@FUZZ
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_noise_ends_the_connection_and_nothing_else(fuzzed, noise):
    daemon, client, kv = fuzzed
    sock = raw(daemon)
    for packet in noise:
        try:
            socket.send_fds(sock, [packet], [0])
        except (BrokenPipeError, ConnectionResetError):
            break
    gone(sock)
    assert client.contains(kv.key, kv.token_ids)


WORDS = st.one_of(st.just(""), st.sampled_from(["agent", "single"]), st.text(max_size=70))
REQUESTS = st.one_of(
    st.builds(m.Get, st.lists(st.binary(min_size=32, max_size=32), max_size=4), WORDS, WORDS),
    st.builds(m.Release, st.lists(st.integers(0, 1 << 40), max_size=9)),
    st.builds(m.Put, st.binary(min_size=32, max_size=32), WORDS, WORDS),
    st.builds(m.PutBuffer),
    st.builds(m.PutFrom, st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40), WORDS, WORDS),
    st.builds(m.Prefetch, st.lists(st.binary(min_size=32, max_size=32), max_size=3), st.integers(-5, 5), WORDS, WORDS),
    st.builds(
        m.Earns,
        st.binary(min_size=32, max_size=32),
        st.integers(0, 1 << 40),
        st.integers(-1, 1 << 63),
        st.sampled_from(["", "a" * 32, "x"]),
        WORDS,
        WORDS,
    ),
    st.builds(
        m.Hint, WORDS, st.sampled_from(["tool_started", "tool_finished", "session_ended", "x"]), st.floats(width=64)
    ),
    st.builds(m.Market, st.integers(-2, 1002)),
    st.builds(m.Pin, st.lists(st.binary(min_size=32, max_size=32), max_size=3), st.booleans()),
    st.builds(m.IndexChanged, st.integers(0, 1 << 60)),
    st.builds(m.Hello, st.integers(0, 3), st.text(max_size=9), st.integers(0, 9)),
    st.builds(m.Lookup, st.lists(st.binary(min_size=32, max_size=32), max_size=3)),
)


@FUZZ
@given(st.lists(st.tuples(REQUESTS, st.integers(0, 4), st.booleans()), min_size=1, max_size=5), st.integers(0, 2**32))
def test_requests_with_wrong_bytes_or_descriptors_do_no_harm(fuzzed, eventually, requests, seed):
    random = Random(seed)
    daemon, client, kv = fuzzed
    before = len(os.listdir("/proc/self/fd"))
    wire = greeted(daemon)
    parcel = Parcel.create(200)
    parcel.seal()
    for request, fds, damage in requests:
        data = bytearray(msgspec.msgpack.encode(request))
        if damage:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        try:
            socket.send_fds(wire.socket, [(7).to_bytes(8, "little"), data], [parcel.fd] * fds)
        except (BrokenPipeError, ConnectionResetError):
            break
    gone(wire.socket)
    parcel.close()
    assert client.contains(kv.key, kv.token_ids)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.fixture
def fuzzed(start, connect, make_kv):
    daemon, client, kv = start(policy="market"), connect(), make_kv(1)
    client.put(kv)
    return daemon, client, kv


def test_who_does_not_say_hello_or_speaks_otherwise_is_told(start):
    daemon = start()
    wire = Wire(raw(daemon), m.REPLIES)
    wire.send(3, m.Hello(99, "later", 1))
    number, reply, _ = wire.receive()
    assert number == 3
    assert "speaks protocol 99" in reply.message
    with pytest.raises(WireError, match="gone"):
        wire.receive()
    wire.close()
    wire = Wire(raw(daemon), m.REPLIES)
    wire.send(3, m.Ping())
    with pytest.raises(WireError, match="gone"):
        wire.receive()
    wire.close()


@FUZZ
@given(st.binary(max_size=PACKET * 2), st.integers(0, 2**64 - 1))
def test_what_is_sent_is_received_long_or_short(data, number):
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, two = Wire(left, m.REPLIES), Wire(right, m.REPLIES)
    one.send(number, m.Blob(data))
    assert two.receive() == (number, m.Blob(data), [])
    one.close()
    with pytest.raises(WireError):
        two.receive()
    with pytest.raises(WireError):
        two.send(1, m.Done())
    two.close()


def test_a_message_in_memory_that_can_still_change_is_refused():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wire = Wire(right, m.REPLIES)
    parcel = Parcel.create(10)
    socket.send_fds(left, [(1).to_bytes(8, "little")], [parcel.fd])
    with pytest.raises(WireError, match="not sealed"):
        wire.receive()
    socket.send_fds(left, [(1).to_bytes(8, "little")], [])
    with pytest.raises(WireError, match="neither a message nor memory"):
        wire.receive()
    left.close()
    wire.close()


def test_replies_for_which_there_are_no_numbers_end_the_connection(fuzzed):
    daemon, client, kv = fuzzed
    wire = greeted(daemon)
    key = bytes.fromhex(kv.key)
    wire.send((1 << 64) - 1, m.Get([key]))
    assert isinstance(wire.receive()[1], m.Lent)
    wire.send((1 << 64) - 1, m.Get([key, key]))
    with pytest.raises(WireError, match="gone"):
        wire.receive()
    wire.close()
    assert client.get(kv.key, kv.token_ids) is not None
