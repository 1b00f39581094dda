"""Readers of chunk files on a local disk, layer by layer, everything verified as it is read."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np

from blendkv.errors import DamagedChunkError, StoreError
from blendkv.store.base import Layer
from blendkv.store.chunkfile import (
    Filed,
    Header,
    TensorSpan,
    check_key,
    ids_of,
    parse_header,
    read_header,
    read_span,
    token_ids_digest,
)
from blendkv.store.index import Row
from blendkv.store.segments import PREFIX_BYTES, Packer, Table, length_of
from blendkv.types import TokenIds


class FileReader(Filed, ABC):
    """An open chunk file. An eviction meanwhile does no harm; it is closed with the reader.

    ``row`` says what it must hold. With ``fd`` the file is open already, and ``path`` is not looked at.

    Raises
    ------
    DamagedChunkError
        If the file is missing, unreadable, truncated, has an altered header, or is not the one of ``row``.
    """

    tier = "disk"

    def __init__(self, path: Path, row: Row, fd: int | None = None) -> None:
        self._row = row
        self.bytes_read = 0
        self._fd = open_file(path, row.key) if fd is None else fd
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self.header = self._read_header()
            _check_row(self.header, row)
        except BaseException:
            self.close()
            raise

    @property
    def key(self) -> str:
        """The chunk key."""
        return self._row.key

    @property
    def token_ids(self) -> TokenIds:
        """Token ids, int32 ``[tokens]``, as the index has them."""
        return self._row.token_ids

    @abstractmethod
    def layer(self, index: int) -> Layer:
        """Read K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``.

        Raises
        ------
        DamagedChunkError
            If the bytes are missing, altered or unreadable.
        IndexError
            If there is no such layer.
        """

    @abstractmethod
    def fill(self, index: int, file: memoryview) -> None:
        """Read the bytes of layer ``index`` to their place in ``file``, the memory of the whole plain file.

        Raises
        ------
        DamagedChunkError, IndexError
            As `layer`.
        """

    @abstractmethod
    def fill_head(self, file: memoryview) -> None:
        """Read what stands before the layers to its place in ``file``: the header and the token ids.

        Raises
        ------
        DamagedChunkError
            If the bytes are missing, altered or unreadable.
        """

    @abstractmethod
    def verify(self) -> None:
        """Read all of it.

        Raises
        ------
        DamagedChunkError
            If something is damaged.
        """

    def readahead(self, index: int) -> None:
        """Ask the kernel to read layer ``index`` into its page cache; does nothing where that cannot be asked."""
        if not self._closer.alive or not hasattr(os, "posix_fadvise"):
            return
        for start, size in self._ranges(index):
            os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_WILLNEED)

    def whole(self) -> memoryview:
        """The whole plain file, read into memory.

        Raises
        ------
        DamagedChunkError
            As `verify`.
        """
        file = np.empty(self.header.file_bytes, dtype=np.uint8).data
        self.fill_head(file)
        for index in range(self.layers):
            self.fill(index, file)
        return file

    def fileno(self) -> int:
        """The descriptor of the open file."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        self._closer()

    @abstractmethod
    def _read_header(self) -> Header:
        """The header of the plain file."""

    @abstractmethod
    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """(first byte, bytes) of what layer ``index`` takes in the file."""

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise StoreError(f"the reader of chunk KV {self.key[:12]} is closed; ask the store for a new one")


class DiskReader(FileReader):
    """Reads a plain chunk file (`blendkv.store.chunkfile`) tensor by tensor."""

    def layer(self, index: int) -> Layer:
        """See `FileReader.layer`."""
        from blendkv.store.tensors import decode_layer

        parts = {}
        for part, span in self.header.layer(index).items():
            parts[part] = span, np.empty(span.size, dtype=np.uint8).data
            self._read(*parts[part])
        return decode_layer(self.recipe, parts)

    def fill(self, index: int, file: memoryview) -> None:
        """See `FileReader.fill`."""
        for span in self.header.layer(index).values():
            self._read(span, file[span.start : span.start + span.size])

    def fill_head(self, file: memoryview) -> None:
        """See `FileReader.fill_head`."""
        ids = self.header.tensors["token_ids"]
        start = min(span.start for span in self.header.tensors.values())
        file[:start] = os.pread(self._fd, start, 0)
        self._read(ids, file[ids.start : ids.start + ids.size])

    def verify(self) -> None:
        """See `FileReader.verify`."""
        for span in self.header.tensors.values():
            self._read(span, memoryview(bytearray(span.size)))

    def _read_header(self) -> Header:
        return read_header(self._fd, self.key)

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        return [(span.start, span.size) for span in self.header.layer(index).values()]

    def _read(self, span: TensorSpan, into: memoryview) -> None:
        self._check_open()
        read_span(self._fd, self.key, span, into)
        self.bytes_read += span.size


class SealedReader(FileReader):
    """Reads a chunk file in sealed segments (`blendkv.store.segments`); the seal's tag vouches for every byte.

    ``packer`` opens the segments.
    """

    def __init__(self, path: Path, row: Row, packer: Packer) -> None:
        self._packer = packer
        super().__init__(path, row)

    def layer(self, index: int) -> Layer:
        """See `FileReader.layer`."""
        from blendkv.store.tensors import decode_layer

        spans = self.header.layer(index)
        start, _ = self.header.layer_range(index)
        data = memoryview(bytearray(self._segment(index + 1)))  # torch wants memory that could be written
        parts = {name: (s, data[s.start - start : s.start - start + s.size]) for name, s in spans.items()}
        return decode_layer(self.recipe, parts)

    def fill(self, index: int, file: memoryview) -> None:
        """See `FileReader.fill`."""
        start, stop = self.header.layer_range(index)
        file[start:stop] = self._segment(index + 1)

    def fill_head(self, file: memoryview) -> None:
        """See `FileReader.fill_head`."""
        data = self._segment(0)
        file[: data.nbytes] = data

    def verify(self) -> None:
        """See `FileReader.verify`."""
        for number in range(len(self._table.segments)):
            self._segment(number)

    def _read_header(self) -> Header:
        self._table = _read_table(self._fd, self.key)
        header, _ = _opened_head(self._segment(0), self._table, self.key)
        return header

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        self.header.layer(index)  # whether there is one
        segment = self._table.segments[index + 1]
        return [(segment.start, segment.stored)]

    def _segment(self, number: int) -> memoryview:
        self._check_open()
        row = self._table.segments[number]
        stored = read_bytes(self._fd, self.key, row.start, row.stored)
        self.bytes_read += row.stored
        return self._packer.unpack(self.key, self._table, number, stored)


def adopt_plain(fd: int, key: str) -> tuple[Header, TokenIds]:
    """Read and verify every byte of an open chunk file of which nothing is known but its name.

    Raises
    ------
    DamagedChunkError
        If it is damaged, or another chunk's.
    """
    header = read_header(fd, key)
    data = {span.name: memoryview(bytearray(span.size)) for span in header.tensors.values()}
    for span in header.tensors.values():
        read_span(fd, key, span, data[span.name])
    ids = np.frombuffer(data["token_ids"], dtype="<i4").astype(np.int32)
    ids.flags.writeable = False
    check_key(key, header, ids)
    return header, ids


def adopt_sealed(fd: int, key: str, packer: Packer) -> tuple[Header, TokenIds]:
    """`adopt_plain` for a file in sealed segments."""
    table = _read_table(fd, key)

    def segment(number: int) -> memoryview:
        row = table.segments[number]
        return packer.unpack(key, table, number, read_bytes(fd, key, row.start, row.stored))

    header, ids = _opened_head(segment(0), table, key)
    for number in range(1, len(table.segments)):
        segment(number)
    check_key(key, header, ids)
    return header, ids


def open_file(path: Path, key: str) -> int:
    """A descriptor of a chunk file, to read.

    Raises
    ------
    DamagedChunkError
        If it is not there, or cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise DamagedChunkError(key, "missing: no such file") from error
    except OSError as error:
        raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error


def read_bytes(fd: int, key: str, start: int, size: int) -> memoryview:
    """Bytes of an open file, in memory of their own.

    Raises
    ------
    DamagedChunkError
        If they are not there, or cannot be read.
    """
    into, done = np.empty(size, dtype=np.uint8).data, 0
    while done < size:
        try:
            count = os.preadv(fd, [into[done:]], start + done)
        except OSError as error:
            raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error
        if count == 0:
            raise DamagedChunkError(key, f"truncated: the file ends after {start + done} of {start + size} bytes")
        done += count
    return into


def _read_table(fd: int, key: str) -> Table:
    size = os.fstat(fd).st_size
    if size < PREFIX_BYTES:
        raise DamagedChunkError(key, f"truncated: {size} bytes")
    length = length_of(read_bytes(fd, key, 0, PREFIX_BYTES), key)
    table = Table.parse(read_bytes(fd, key, 0, min(length, size)), key)
    if table.total != size:
        raise DamagedChunkError(
            key, f"truncated: {size} of {table.total} bytes" if size < table.total else "header: data behind its end"
        )
    return table


def _opened_head(data: memoryview, table: Table, key: str) -> tuple[Header, TokenIds]:
    """The header and the token ids in the first segment, if the layers are those of the others."""
    header = parse_header(data, sum(segment.raw for segment in table.segments), key)
    layers = [stop - start for start, stop in map(header.layer_range, range(header.layers))]
    if not header.in_order or layers != [segment.raw for segment in table.segments[1:]]:
        raise DamagedChunkError(key, "header: the segments are not the file's layers")
    return header, ids_of(header, data)


def _check_row(header: Header, row: Row) -> None:
    if (header.fingerprint, header.recipe) != (row.fingerprint, row.recipe):
        raise DamagedChunkError(row.key, "mismatch: the file holds a chunk of another model or recipe")
    if header.token_ids_digest != token_ids_digest(row.token_ids):
        raise DamagedChunkError(row.key, "mismatch: the file holds other token ids")
