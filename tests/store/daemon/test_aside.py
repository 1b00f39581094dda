"""Chunks that find no room in the arena and that a client cannot read by itself: sealed ones, and remote ones."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from blendkv.daemon.arena import PAGE
from blendkv.daemon.aside import Asides
from blendkv.errors import DamagedChunkError
from blendkv.store.seal import KEY_VARIABLE

TOKENS = 200
"""Of a chunk that has no room in an arena of a page."""


@pytest.fixture
def keyed(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(bytes(range(32))).decode())


def test_a_sealed_chunk_without_room_in_the_arena_is_read(start, connect, make_kv, assert_same, keyed, eventually):
    daemon, client = start(PAGE, encrypt=True), connect()
    kvs = [make_kv(number, tokens=TOKENS) for number in range(3)]
    for kv in kvs:
        client.put(kv)
    before = len(os.listdir("/proc/self/fd"))
    readers = client.get_all([(kv.key, kv.token_ids) for kv in kvs])
    for reader, kv in zip(readers, kvs, strict=True):
        assert_same(reader, kv)
    assert daemon.stats().loans == 3
    assert daemon.store._asides._bytes == 3 * _file_bytes(kvs[0])
    del reader, readers
    eventually(lambda: daemon.stats().loans == 0)
    assert daemon.store._asides._bytes == 0
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert client.prefetch([kvs[0].key]) == 0
    assert client.stat().not_in_memory == 3 + 3 + 1, "three puts, three gets, a prefetch"
    assert client.stat().tiers[0].chunks == 0


def test_a_client_that_ends_gives_back_what_lies_aside(start, connect, make_kv, keyed, eventually):
    daemon, client, kv = start(PAGE, encrypt=True), connect(), make_kv(1, tokens=TOKENS)
    client.put(kv)
    reader = client.get(kv.key, kv.token_ids)
    assert daemon.store._asides._bytes > 0
    client.close()
    del reader
    eventually(lambda: daemon.store._asides._bytes == 0)


def test_no_more_than_the_limit_lies_aside(
    start, connect, make_kv, assert_same, keyed, monkeypatch, caplog, eventually
):
    kvs = [make_kv(number, tokens=TOKENS) for number in range(4)]
    monkeypatch.setattr("blendkv.daemon.store.LEAST_ROOM", 2 * _file_bytes(kvs[0]))
    daemon, client = start(PAGE, encrypt=True), connect()
    for kv in kvs:
        client.put(kv)
    readers = client.get_all([(kv.key, kv.token_ids) for kv in kvs])
    found = [reader is not None for reader in readers]
    assert sum(found) == 2, "and the others are missed"
    for reader, kv in zip(readers, kvs, strict=True):
        if reader is not None:
            assert_same(reader, kv)
    assert client.stat().failed_loads == 2
    assert sum("nor beside it" in record.message for record in caplog.records) == 1
    readers.clear()
    del reader
    eventually(lambda: daemon.stats().loans == 0)
    assert_same(client.get(kvs[3].key, kvs[3].token_ids), kvs[3])


def test_a_damaged_sealed_chunk_is_dropped_on_the_way(start, connect, make_kv, keyed, tmp_path):
    start(PAGE, encrypt=True)
    client, kv = connect(), make_kv(1, tokens=TOKENS)
    client.put(kv)
    (path,) = Path(tmp_path / "s" / "kv").rglob("*.sealed")
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert client.get(kv.key, kv.token_ids) is None
    assert client.stat().discarded == {"checksum": 1}
    assert not client.contains(kv.key, kv.token_ids)


def test_a_remote_chunk_without_room_is_read_and_goes_to_disk(
    start, connect, make_kv, assert_same, tmp_path, eventually
):
    remotes = [f"file://{tmp_path}/shared"]
    kv = make_kv(1, tokens=TOKENS)
    daemon, client = start(PAGE, remotes=remotes), connect()
    client.put(kv)
    eventually(lambda: client.stat().uploaded == 1)
    daemon.store._files.delete(kv.key)
    assert_same(client.get(kv.key, kv.token_ids), kv)
    eventually(lambda: daemon.store.index.count() == 1)
    eventually(lambda: daemon.stats().loans == 0)
    assert_same(client.get(kv.key, kv.token_ids), kv)
    assert daemon.stats().loans == 0, "from the file on disk"


class _Source:
    def __init__(self, header, fails=False):
        self.header = header
        self.fails = fails
        self.closed = 0

    def fill_head(self, file):
        pass

    def fill(self, index, file):
        if self.fails:
            raise DamagedChunkError("k", "unreadable: gone")

    def close(self):
        self.closed += 1


def test_room_is_given_back_when_reading_fails(make_kv):
    from blendkv.store.chunkfile import parse_header
    from blendkv.store.tensors import encode_chunk

    kv = make_kv(1, tokens=TOKENS)
    file = encode_chunk(kv)
    header = parse_header(file, file.nbytes, kv.key)
    asides = Asides(10)
    broken = _Source(header, fails=True)
    with pytest.raises(DamagedChunkError):
        asides.read(broken)
    larger = asides.read(_Source(header))
    assert larger is not None, "one chunk, whatever its size"
    refused = _Source(header)
    assert asides.read(refused) is None
    assert (broken.closed, refused.closed) == (1, 1)
    asides.back(larger)
    assert asides.read(_Source(header)) is not None


def _file_bytes(kv):
    from blendkv.store.tensors import encode_chunk

    return encode_chunk(kv).nbytes
