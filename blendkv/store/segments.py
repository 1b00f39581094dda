"""How a chunk file is kept in a remote tier: a table, then its segments.

Segment 0 is what stands before layer 0 in the chunk file (header and token ids), segment i + 1 is layer i. Each may be
compressed, losslessly, and sealed. The table leads; all numbers are little-endian:

====== ========================================================================
bytes  meaning
====== ========================================================================
8      ``BLENDKVR``
2      format, 1
2      flags: 1 = the segments are sealed (`blendkv.store.seal`)
4      bytes of the table
16     a random name for this writing of the chunk
28 n   per segment: stored bytes (8), raw bytes (8), XXH3-64 of the stored bytes (8), flags (4): 1 = Zstandard
8      XXH3-64 of all that precedes; this and the first 16 bytes are the same in every format
====== ========================================================================
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from blendkv.errors import DamagedChunkError, InputError, StoreError, StoreMismatchError
from blendkv.store.chunkfile import HEADER_LIMIT
from blendkv.store.seal import OVERHEAD, Sealer

FORMAT = 1
LAYER_LIMIT = 4096
"""Most layers of a chunk."""
SEGMENT_LIMIT = (1 << 31) - 1
"""Most bytes of a segment, raw or stored: what AES-GCM takes at once here."""
PREFIX_BYTES = 16
"""Bytes that tell how long a table is."""
_MAGIC = b"BLENDKVR"
_PREFIX = struct.Struct("<8sHHI")
_ENTRY = struct.Struct("<QQQI")
_SEALED = _ZSTD = 1
_NAME_BYTES = 16
_CHECKSUM_BYTES = 8
_TABLE_LIMIT = 1 << 20
_ZSTD_MOST = 1 << 15  # a block of Zstandard yields 128 KiB at most, and takes 4 bytes at least


@dataclass(frozen=True)
class Segment:
    """Where a segment lies: ``start`` counts from the table's first byte; ``raw`` is its size before packing."""

    start: int
    stored: int
    raw: int
    checksum: int
    compressed: bool


@dataclass(frozen=True)
class Table:
    """What leads a stored chunk. ``writing`` tells this writing of the chunk from others under the same key."""

    writing: bytes
    sealed: bool
    segments: tuple[Segment, ...]

    @property
    def total(self) -> int:
        """Bytes of table and segments."""
        last = self.segments[-1]
        return last.start + last.stored

    def encode(self) -> bytes:
        """The table's bytes."""
        prefix = _PREFIX.pack(_MAGIC, FORMAT, _SEALED * self.sealed, table_bytes(len(self.segments)))
        rows = b"".join(_ENTRY.pack(s.stored, s.raw, s.checksum, _ZSTD * s.compressed) for s in self.segments)
        body = prefix + self.writing + rows
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")

    @classmethod
    def parse(cls, leading: bytes | memoryview, key: str) -> Table:
        """Read the table at the beginning of ``leading``, `length_of` bytes or more.

        Raises
        ------
        DamagedChunkError
            If it is cut, altered or says what cannot be.
        StoreMismatchError
            If a newer version of BlendKV wrote it.
        """
        length = length_of(leading, key)
        data = memoryview(leading)[:length]
        if data.nbytes < length:
            raise DamagedChunkError(key, f"truncated: {data.nbytes} of the table's {length} bytes")
        body = data[:-_CHECKSUM_BYTES]
        if xxhash.xxh3_64_intdigest(body) != int.from_bytes(data[-_CHECKSUM_BYTES:], "little"):
            raise DamagedChunkError(key, "checksum: the table was altered")
        _, version, flags, _ = _PREFIX.unpack_from(data)
        if version > FORMAT:
            raise StoreMismatchError(
                f"chunk KV {key[:12]} has remote format {version}; up to {FORMAT} can be read: upgrade blendkv"
            )
        first = PREFIX_BYTES + _NAME_BYTES
        count = (body.nbytes - first) // _ENTRY.size
        if version != FORMAT or flags > _SEALED or table_bytes(count) != length or not 2 <= count <= LAYER_LIMIT + 1:
            raise DamagedChunkError(key, "header: the table contradicts itself")
        sealed = bool(flags & _SEALED)
        segments, start = [], length
        for stored, raw, checksum, marks in _ENTRY.iter_unpack(body[first:]):
            segments.append(Segment(start, stored, raw, checksum, bool(marks & _ZSTD)))
            start += stored
            limit = HEADER_LIMIT if len(segments) == 1 else SEGMENT_LIMIT
            if marks > _ZSTD or not _possible(segments[-1], sealed, limit):
                raise DamagedChunkError(key, f"header: segment {len(segments) - 1} cannot be")
        return cls(bytes(data[PREFIX_BYTES:first]), sealed, tuple(segments))


def table_bytes(segments: int) -> int:
    """Bytes of the table of so many segments."""
    return PREFIX_BYTES + _NAME_BYTES + _ENTRY.size * segments + _CHECKSUM_BYTES


def length_of(leading: bytes | memoryview, key: str) -> int:
    """Bytes of the table that begins with ``leading``, 16 bytes or more.

    Raises
    ------
    DamagedChunkError
        If that is no table, or one longer than allowed.
    """
    if len(leading) < PREFIX_BYTES:
        raise DamagedChunkError(key, f"truncated: {len(leading)} bytes")
    magic, _, _, length = _PREFIX.unpack_from(leading)
    if magic != _MAGIC:
        raise DamagedChunkError(key, "header: not a chunk KV")
    if not table_bytes(0) <= length <= _TABLE_LIMIT:
        raise DamagedChunkError(key, f"header: a table of {length} bytes")
    return int(length)


def _possible(segment: Segment, sealed: bool, limit: int) -> bool:
    """Whether the sizes of a segment go together, so that nothing is allocated for what was never stored."""
    held = segment.stored - OVERHEAD * sealed
    if held < 0 or max(segment.stored, segment.raw) > limit:
        return False
    return segment.raw <= held * _ZSTD_MOST if segment.compressed else segment.raw == held


@dataclass(frozen=True)
class Traffic:
    """Bytes that went through a packer: raw on the store's side, stored on the remote side."""

    raw_written: int = 0
    stored_written: int = 0
    raw_read: int = 0
    stored_read: int = 0

    @property
    def ratio(self) -> float | None:
        """Raw bytes per stored byte of all that was written; None before anything was."""
        return self.raw_written / self.stored_written if self.stored_written else None


class Packer:
    """Turns segments into what is stored, and back. Safe to use from several threads.

    Parameters
    ----------
    level
        Zstandard's level, 1 to 19; None leaves the segments as they are. A segment that it does not make smaller is
        stored as it is.
    sealer
        Encrypts the segments; None stores them in the clear.

    Raises
    ------
    InputError
        If there is no such level.
    """

    def __init__(self, level: int | None = None, sealer: Sealer | None = None) -> None:
        if level is not None and not 1 <= level <= 19:
            raise InputError(f"zstd={level}: give a level from 1 (fast) to 19 (small)")
        self._level = level
        self._sealer = sealer
        self._traffic = Traffic()
        self._lock = threading.Lock()

    @property
    def traffic(self) -> Traffic:
        """What went through so far."""
        return self._traffic

    def pack(self, key: str, segments: Sequence[memoryview]) -> tuple[Table, list[bytes | memoryview]]:
        """Pack the segments of a chunk; those that are neither compressed nor sealed are passed on uncopied.

        Raises
        ------
        StoreError
            If there are too many, or one is too large.
        """
        if not 2 <= len(segments) <= LAYER_LIMIT + 1:
            raise StoreError(f"a chunk KV of {len(segments) - 1} layers; 1 to {LAYER_LIMIT} can be kept remotely")
        rows, packed, start = [], [], table_bytes(len(segments))
        for number, segment in enumerate(segments):
            raw = segment.cast("B")
            limit = SEGMENT_LIMIT if number else HEADER_LIMIT
            if raw.nbytes + OVERHEAD > limit:
                raise StoreError(
                    f"segment {number} of chunk KV {key[:12]} has {raw.nbytes} bytes, {limit - OVERHEAD} can be kept "
                    "remotely; use shorter chunks"
                )
            data, compressed = self._compressed(raw)
            if self._sealer is not None:
                data = self._sealer.seal(key, number, data)
            stored = len(data)
            rows.append(Segment(start, stored, raw.nbytes, xxhash.xxh3_64_intdigest(data), compressed))
            packed.append(data)
            start += stored
        table = Table(os.urandom(_NAME_BYTES), self._sealer is not None, tuple(rows))
        self._count(raw_written=sum(row.raw for row in rows), stored_written=table.total)
        return table, packed

    def unpack(self, key: str, table: Table, number: int, stored: memoryview) -> memoryview:
        """Return segment ``number`` of a stored chunk as it was packed.

        Raises
        ------
        DamagedChunkError
            If ``stored`` was cut or altered, was sealed with another key, or is sealed (or not) against the settings.
        """
        row = table.segments[number]
        if stored.nbytes != row.stored:
            raise DamagedChunkError(key, f"truncated: segment {number} has {stored.nbytes} of {row.stored} bytes")
        if xxhash.xxh3_64_intdigest(stored) != row.checksum:
            raise DamagedChunkError(key, f"checksum: segment {number} was altered")
        data = stored
        if table.sealed != (self._sealer is not None):  # else whoever can write there could have it read in the clear
            raise DamagedChunkError(key, "sealed: encrypted and no key is set" if table.sealed else "sealed: it is not")
        if self._sealer is not None:
            data = memoryview(self._sealer.open(key, number, stored))
        if row.compressed:
            data = memoryview(_decompressed(key, number, data, row.raw))
        self._count(raw_read=row.raw, stored_read=row.stored)
        return data

    def _compressed(self, raw: memoryview) -> tuple[bytes | memoryview, bool]:
        if self._level is None:
            return raw, False
        import zstandard

        data = zstandard.ZstdCompressor(level=self._level).compress(raw)
        return (data, True) if len(data) < raw.nbytes else (raw, False)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._traffic = replace(
                self._traffic, **{name: getattr(self._traffic, name) + count for name, count in more.items()}
            )


def _decompressed(key: str, number: int, data: memoryview, raw: int) -> bytes:
    """Decompress ``data`` to exactly ``raw`` bytes; nothing is allocated before the frame says the same size."""
    import zstandard

    try:
        if zstandard.frame_content_size(data) != raw:
            raise DamagedChunkError(key, f"header: segment {number} unpacks to another size")
        out = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedChunkError(key, f"unreadable: segment {number}: {error}") from error
    if len(out) != raw:
        raise DamagedChunkError(key, f"truncated: segment {number} unpacks to {len(out)} of {raw} bytes")
    return out
