"""Parsers of what lies in a remote place: any bytes give the chunk, or an error that says what is wrong with them."""

from __future__ import annotations

import mmap
import struct
import tracemalloc

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from blendkv.errors import DamagedChunkError, InputError, StoreError, StoreMismatchError
from blendkv.store.remote import head_bytes, parse_head
from blendkv.store.seal import OVERHEAD, Sealer
from blendkv.store.segments import (
    LAYER_LIMIT,
    PREFIX_BYTES,
    SEGMENT_LIMIT,
    Packer,
    Segment,
    Table,
    length_of,
    table_bytes,
)

KEY = "ab" * 32
SECRET = bytes(range(32))
PACKERS = {
    "plain": lambda: Packer(),
    "zstd": lambda: Packer(3),
    "sealed": lambda: Packer(None, Sealer(SECRET)),
    "both": lambda: Packer(3, Sealer(SECRET)),
}
SEGMENTS = st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 5000).map(bytes)), min_size=2, max_size=6)


def pack(packer: Packer, segments: list[bytes]) -> bytes:
    table, packed = packer.pack(KEY, [memoryview(data) for data in segments])
    return b"".join([table.encode(), *packed])


def unpack(packer: Packer, stored: bytes) -> list[bytes]:
    table = Table.parse(stored, KEY)
    rows = table.segments
    views = [memoryview(stored)[row.start : row.start + row.stored] for row in rows]
    return [bytes(packer.unpack(KEY, table, number, view)) for number, view in enumerate(views)]


def signed(table: bytes) -> bytes:
    """The table with a checksum that fits, so that what is behind the checksum is tried as well."""
    body = table[:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def read_or_refuse(packer: Packer, stored: bytes) -> list[bytes] | None:
    """All segments, or None for an error that is allowed; checks that little memory was taken for it."""
    tracemalloc.start()
    try:
        table = Table.parse(stored, KEY)
        assert head_bytes(stored, KEY) == table.segments[1].start
        parse_head(memoryview(stored), KEY, packer)
        return unpack(packer, stored)
    except (DamagedChunkError, StoreMismatchError):
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (1 << 20) + 100 * len(stored), peak


@pytest.mark.parametrize("name", PACKERS)
@given(segments=SEGMENTS)
def test_what_was_packed_comes_back(name: str, segments: list[bytes]) -> None:
    packer = PACKERS[name]()
    stored = pack(packer, segments)
    assert len(stored) == Table.parse(stored, KEY).total
    assert unpack(packer, stored) == segments
    assert Table.parse(stored, KEY).sealed == (name in ("sealed", "both"))
    assert packer.traffic.raw_written == packer.traffic.raw_read == sum(map(len, segments))
    assert packer.traffic.stored_written == len(stored)


@given(data=st.binary(max_size=400), prefixed=st.booleans())
def test_any_bytes_are_refused(data: bytes, prefixed: bool) -> None:
    stored = b"BLENDKVR\x01\0" + data if prefixed else data
    assert read_or_refuse(Packer(), stored) is None
    if len(stored) >= PREFIX_BYTES:
        assert read_or_refuse(Packer(), signed(stored[:PREFIX_BYTES] + data + bytes(8))) is None


@pytest.mark.parametrize("name", PACKERS)
@given(segments=SEGMENTS, place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_altered_and_cut_chunks_are_found(name: str, segments: list[bytes], place: float, flip: int, cut: bool) -> None:
    packer = PACKERS[name]()
    stored = bytearray(pack(packer, segments))
    at = int(place * len(stored))
    if cut:
        del stored[at:]
    else:
        stored[at] ^= flip
    if cut and at >= Table.parse(pack(packer, segments), KEY).total:
        return
    assert read_or_refuse(packer, bytes(stored)) is None


@pytest.mark.parametrize("name", PACKERS)
@given(segments=SEGMENTS, place=st.floats(0, 1, exclude_max=True), new=st.binary(min_size=1, max_size=9))
def test_altered_tables_that_are_signed_anew_yield_no_other_chunk(
    name: str, segments: list[bytes], place: float, new: bytes
) -> None:
    packer = PACKERS[name]()
    stored = pack(packer, segments)
    length = length_of(stored, KEY)
    table = bytearray(stored[:length])
    at = int(place * (length - 8))
    table[at : at + len(new)] = new
    found = read_or_refuse(packer, signed(bytes(table[:length])) + stored[length:])
    assert found is None or found == segments[: len(found)]


@given(rows=st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3, st.integers(0, 3)), min_size=2, max_size=5))
@example(rows=[(20, 20, 0, 0), (10, 1 << 30, 0, 1)])
@example(rows=[(20, 20, 0, 0), (SEGMENT_LIMIT + 1, SEGMENT_LIMIT + 1, 0, 0)])
@example(rows=[(100 << 20, 100 << 20, 0, 0), (1, 1, 0, 0)])
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(rows: list[tuple[int, int, int, int]]) -> None:
    body = struct.pack("<8sHHI", b"BLENDKVR", 1, 0, table_bytes(len(rows))) + bytes(16)
    stored = signed(body + b"".join(struct.pack("<QQQI", *row) for row in rows) + bytes(8)) + bytes(40)
    assert read_or_refuse(Packer(3), stored) is None


@pytest.mark.parametrize(
    ("stored", "raw", "sealed", "compressed", "allowed"),
    [
        (10, 10, False, False, True), (10, 11, False, False, False), (11, 10, False, False, False),
        (10, 10 << 15, False, True, True), (10, (10 << 15) + 1, False, True, False), (0, 0, False, False, True),
        (38, 10, True, False, True), (38, 38, True, False, False), (27, 0, True, False, False),
        (38, 10 << 15, True, True, True), (38, (10 << 15) + 1, True, True, False),
        (SEGMENT_LIMIT, SEGMENT_LIMIT, False, False, True), (SEGMENT_LIMIT + 1, SEGMENT_LIMIT + 1, False, False, False),
        (1 << 20, SEGMENT_LIMIT + 1, False, True, False),
    ],
)  # fmt: skip
def test_sizes_of_a_segment_go_together(stored: int, raw: int, sealed: bool, compressed: bool, allowed: bool) -> None:
    head = OVERHEAD * sealed
    rows = (Segment(table_bytes(2), head, 0, 0, False), Segment(table_bytes(2) + head, stored, raw, 0, compressed))
    data = Table(bytes(16), sealed, rows).encode()
    if allowed:
        assert Table.parse(data, KEY).segments == rows
    else:
        with pytest.raises(DamagedChunkError, match="segment 1 cannot be"):
            Table.parse(data, KEY)


def test_a_frame_that_claims_more_than_it_has_takes_no_memory() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    length = table_bytes(2)
    row = Segment(length + 1, len(bomb), 1000, xxhash.xxh3_64_intdigest(bomb), True)
    table = Table(bytes(16), False, (Segment(length, 1, 1, xxhash.xxh3_64_intdigest(b"h"), False), row))
    with pytest.raises(DamagedChunkError, match="unpacks to another size"):
        unpack(Packer(3), table.encode() + b"h" + bomb)
    assert read_or_refuse(Packer(3), table.encode() + b"h" + bomb) is None


def test_newer_formats_are_no_damage() -> None:
    stored = bytearray(pack(Packer(), [b"head", b"layer"]))
    stored[8] = 2
    table = signed(bytes(stored[: table_bytes(2)]))
    with pytest.raises(StoreMismatchError, match="upgrade"):
        Table.parse(table, KEY)


def test_sealed_segments_open_with_key_place_and_chunk_only() -> None:
    packer = Packer(None, Sealer(SECRET, "tenant"))
    segments = [b"head", b"layer 0", b"layer 1"]
    stored = pack(packer, segments)
    assert not any(data in stored for data in segments)
    assert unpack(packer, stored) == segments
    assert pack(packer, segments) != stored  # another nonce
    table = Table.parse(stored, KEY)
    views = [memoryview(stored)[row.start : row.start + row.stored] for row in table.segments]
    strangers = {
        "another key": (Packer(None, Sealer(bytes(32), "tenant")), KEY, 1, views[1]),
        "another tenant": (Packer(None, Sealer(SECRET, "other")), KEY, 1, views[1]),
        "no key": (Packer(), KEY, 1, views[1]),
        "another chunk": (packer, "cd" * 32, 1, views[1]),
    }
    for name, (reader, key, number, view) in strangers.items():
        with pytest.raises(DamagedChunkError, match="sealed"):
            print(name, reader.unpack(key, table, number, view))
    with pytest.raises(DamagedChunkError, match="sealed: segment 2"):
        Sealer(SECRET, "tenant").open(KEY, 2, views[1])
    plain = pack(Packer(), segments)
    with pytest.raises(DamagedChunkError, match="sealed: it is not"):
        unpack(packer, plain)


@given(data=st.binary(max_size=200), place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_altered_sealed_bytes_never_open(data: bytes, place: float, flip: int) -> None:
    sealer = Sealer(SECRET)
    sealed = bytearray(sealer.seal(KEY, 3, data))
    assert len(sealed) == len(data) + OVERHEAD
    assert sealer.open(KEY, 3, sealed) == data
    at = int(place * len(sealed))
    with pytest.raises(DamagedChunkError):
        sealer.open(KEY, 3, sealed[:at])
    sealed[at] ^= flip
    with pytest.raises(DamagedChunkError, match="sealed"):
        sealer.open(KEY, 3, sealed)


@pytest.mark.parametrize("text", ["x?", "AAAA", "A" * 43, "%" * 44, "é", "A" * 88])
def test_a_key_that_is_none_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InputError, match="openssl rand") as caught:
        Sealer.from_environment(environ={"BLENDKV_ENCRYPTION_KEY": text})
    assert text not in str(caught.value)
    assert Sealer.from_environment(environ={"BLENDKV_ENCRYPTION_KEY": ""}) is None


def test_a_chunk_that_is_too_much_is_refused_before_it_is_read() -> None:
    huge = memoryview(mmap.mmap(-1, SEGMENT_LIMIT))  # never touched, so it takes no memory
    with pytest.raises(StoreError, match="shorter chunks"):
        Packer().pack(KEY, [memoryview(b"h"), huge])
    with pytest.raises(StoreError, match="segment 0"):
        Packer().pack(KEY, [huge[: 65 << 20], memoryview(b"layer")])
    with pytest.raises(StoreError, match="layers"):
        Packer().pack(KEY, [memoryview(b"h")] * (LAYER_LIMIT + 2))
    with pytest.raises(InputError, match="zstd=20"):
        Packer(20)
