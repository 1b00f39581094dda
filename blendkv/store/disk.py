"""The disk tier: one file per chunk KV under ``kv/``, named by its key, and the index."""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic

import numpy as np

from blendkv.errors import DamagedChunkError, StoreError, StoreFullError
from blendkv.store.base import Chunk, EvictionPolicy, HeldChunk, Layer, TierStat
from blendkv.store.chunkfile import Header, TensorSpan, read_header, read_span, token_ids_digest
from blendkv.store.files import fsync_directory, make_directory, temporary_file, write_all
from blendkv.store.index import Index, Row
from blendkv.types import Recipe, TokenIds

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Evicting the new file's size once should do; concurrent writers and whole blocks may want it again. A bound, because
# a device that others fill must not cost the whole store.
_FULL_TRIES = 3


class DiskReader:
    """Reads one chunk file layer by layer, each tensor verified as it is read.

    The file stays open, so an eviction meanwhile does no harm. It is closed with the reader. With ``fd`` it is open
    already, and ``path`` is not looked at.

    Raises
    ------
    DamagedChunkError
        If the file is missing, unreadable, truncated, has an altered header, or is not the one of ``row``.
    """

    tier = "disk"

    def __init__(self, path: Path, row: Row, fd: int | None = None) -> None:
        self._row = row
        self.bytes_read = 0
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except FileNotFoundError as error:
            raise DamagedChunkError(row.key, "missing: no such file") from error
        except OSError as error:
            raise DamagedChunkError(row.key, f"unreadable: {error.strerror}") from error
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        try:
            self.header = _checked_header(fd, row)
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

    @property
    def recipe(self) -> Recipe:
        """How the chunk KV was computed."""
        return self._row.recipe

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that computed it."""
        return self._row.fingerprint

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.header.layers

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V."""
        return self._row.nbytes

    def layer(self, index: int) -> Layer:
        """Read K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``.

        Raises
        ------
        DamagedChunkError
            If the bytes are missing, altered or unreadable.
        IndexError
            If there is no such layer.
        """
        from blendkv.store.tensors import decode_layer

        parts = {}
        for part, span in self.header.layer(index).items():
            parts[part] = span, np.empty(span.size, dtype=np.uint8).data
            self._read(*parts[part])
        return decode_layer(self.recipe, parts)

    def fill(self, index: int, file: memoryview) -> None:
        """Read the bytes of layer ``index`` to their place in ``file``, the memory of the whole file.

        Raises
        ------
        DamagedChunkError, IndexError
            As `layer`.
        """
        for span in self.header.layer(index).values():
            self._read(span, file[span.start : span.start + span.size])

    def fill_head(self, file: memoryview) -> None:
        """Read what stands before the layers to its place in ``file``: the header and the token ids.

        Raises
        ------
        DamagedChunkError
            If the bytes are missing, altered or unreadable.
        """
        ids = self.header.tensors["token_ids"]
        start = min(span.start for span in self.header.tensors.values())
        file[:start] = os.pread(self._fd, start, 0)
        self._read(ids, file[ids.start : ids.start + ids.size])

    def readahead(self, index: int) -> None:
        """Ask the kernel to read layer ``index`` into its page cache; does nothing where that cannot be asked."""
        if not self._closer.alive or not hasattr(os, "posix_fadvise"):
            return
        for span in self.header.layer(index).values():
            os.posix_fadvise(self._fd, span.start, span.size, os.POSIX_FADV_WILLNEED)

    def verify(self) -> None:
        """Read every tensor.

        Raises
        ------
        DamagedChunkError
            If one is damaged.
        """
        for span in self.header.tensors.values():
            self._read(span, memoryview(bytearray(span.size)))

    def fileno(self) -> int:
        """The descriptor of the open file."""
        return self._fd

    def close(self) -> None:
        """Close the file."""
        self._closer()

    def _read(self, span: TensorSpan, into: memoryview) -> None:
        if not self._closer.alive:
            raise StoreError(f"the reader of chunk KV {self.key[:12]} is closed; ask the store for a new one")
        read_span(self._fd, self.key, span, into)
        self.bytes_read += span.size


class DiskTier(Generic[HeldChunk]):
    """Chunk KVs on a local disk. ``limit`` bounds the bytes of the files (None: no limit), pinned ones included.

    ``encode`` returns the file of a chunk as it is held in memory. Without a ``policy`` the least recently used goes
    first, in the order that the index has: a policy holds every key in this process, 350 MB for a million.

    Every change of a file's name and of its row happens inside one write transaction of the index, so that processes
    which share the store never see one without the other; only a crash can part them, and a sweep mends that.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        index: Index,
        limit: int | None,
        policy: EvictionPolicy | None,
        encode: Callable[[HeldChunk], memoryview],
    ) -> None:
        self._encode = encode
        self.root = root
        self.index = index
        self.limit = limit
        self._policy = policy
        self._seen = 0  # the last tick of the index that the policy knows of
        self._evictions: Counter[str] = Counter()

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, from the index, or None."""
        row = self.index.row(key)
        return None if row is None else row.token_ids

    def contains(self, key: str) -> bool:
        """Whether the index has ``key``."""
        return self.index.row(key) is not None

    def open(self, key: str) -> DiskReader | None:
        """Open the file of ``key``, or return None; does not count as a use.

        Raises
        ------
        DamagedChunkError
            If the index has it and the file cannot be used.
        """
        row = self.index.row(key)
        if row is None:
            return None
        try:
            return DiskReader(self.root / row.path, row)
        except DamagedChunkError:
            # It may be on its way out, or be stored anew: only under the write lock is a fault certain.
            with self._errors(), self.index.transaction():
                row = self.index.row(key)
                return None if row is None else DiskReader(self.root / row.path, row)

    def get(self, key: str) -> DiskReader | None:
        """Open the file of ``key``, or return None; counts as a use.

        Raises
        ------
        DamagedChunkError
            If the index has it and the file cannot be used.
        """
        reader = self.open(key)
        if reader is not None:
            self.index.touch(key)
        return reader

    def put(self, kv: HeldChunk) -> None:
        """Write ``kv``: its file first, then its row. A chunk that is there already is left as it is.

        Raises
        ------
        StoreFullError
            If the device is full, or the limit is reached, and eviction does not help.
        StoreError
            If the file cannot be written, or another chunk has the key.
        """
        if self._present(kv):
            self.index.touch(kv.key)
            return
        data = self._encode(kv)
        with self._errors():
            for _ in range(_FULL_TRIES):
                try:
                    self._write(kv, data)
                    return
                except OSError as error:
                    if error.errno not in _FULL or not self._evict_for_space(len(data)):
                        raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def delete(self, key: str) -> bool:
        """Delete the file and the row of ``key``; return whether it was there.

        Raises
        ------
        StoreError
            If the directory cannot be written.
        """
        with self._errors(), self.index.transaction():
            return self._drop(key) is not None

    def shrink(self) -> tuple[int, int]:
        """Evict down to the limit; return the number of chunks and the bytes that left.

        Raises
        ------
        StoreError
            If the directory cannot be written.
        """
        if self.limit is None:
            return 0, 0
        with self._errors(), self.index.transaction():
            return self._evict(self.index.totals()[1] - self.limit, "limit")

    def drop_page_cache(self, keys: Iterable[str]) -> None:
        """Drop the files of ``keys`` from the kernel's page cache: the next read is cold. For benchmarks.

        Raises
        ------
        StoreError
            If a key is not there, or the system has no such call.
        """
        if not hasattr(os, "posix_fadvise"):
            raise StoreError("this system cannot drop a file from its page cache; measure cold reads on Linux")
        for key in keys:
            row = self.index.row(key)
            if row is None:
                raise StoreError(f"no chunk KV {key[:12]} on disk; list the store for its keys")
            fd = os.open(self.root / row.path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def stat(self) -> TierStat:
        """Chunks, bytes of their files, limit and evictions."""
        chunks, size = self.index.totals()
        return TierStat(self.name, chunks, size, self.limit, evictions=dict(self._evictions))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(
                    f"no space on the device of {self.root}, even after eviction; free some, or set a disk limit"
                ) from error
            raise StoreError(f"cannot write to the store at {self.root}: {error.strerror}; check its rights") from error

    def _write(self, kv: Chunk, data: memoryview) -> None:
        relative = chunk_path(kv.key)
        target = self.root / relative
        make_directory(target.parent)
        with temporary_file(target) as (fd, temporary):
            write_all(fd, data)
            os.fsync(fd)
            with self.index.transaction() as undo:
                if self._present(kv):  # another thread or process was faster
                    return
                self.index.delete(kv.key)  # a row whose file is gone
                self._make_room(len(data))
                os.replace(temporary, target)
                undo.append(target.unlink)
                fsync_directory(target.parent)
                now = time.time()
                self.index.insert(
                    Row(kv.key, kv.fingerprint, kv.recipe, kv.token_ids, kv.nbytes, len(data), relative, now, now)
                )

    def _present(self, kv: Chunk) -> bool:
        row = self.index.row(kv.key)
        if row is None:
            return False
        if not same_chunk(row, kv):
            raise StoreError(f"another chunk is stored under the key {kv.key[:12]}; remove it first")
        return (self.root / row.path).exists()

    def _make_room(self, size: int) -> None:
        if self.limit is None:
            return
        pinned = sum(self.index.pinned().values())
        if size > self.limit - pinned:
            raise StoreFullError(
                f"a chunk KV of {size} bytes does not fit on disk: the limit is {self.limit} bytes, {pinned} of them "
                "pinned; raise the limit or unpin some"
            )
        self._evict(self.index.totals()[1] + size - self.limit, "limit")

    def _evict_for_space(self, size: int) -> int:
        with self.index.transaction():
            return self._evict(size, "full")[0]

    def _evict(self, needed: int, reason: str) -> tuple[int, int]:
        if needed <= 0:
            return 0, 0
        self.index.apply_touches()
        count = freed = 0
        # A victim may be gone, evicted by another process: then it frees nothing and the policy is asked again.
        while freed < needed and (victims := self._victims(needed - freed)):
            for key in victims:
                dropped = self._drop(key)
                if self._policy is not None:
                    self._policy.removed(key)
                if dropped is not None:
                    count, freed = count + 1, freed + dropped
        self._evictions[reason] += count
        return count, freed

    def _victims(self, nbytes: int) -> list[str]:
        if self._policy is None:
            return self.index.oldest(nbytes)
        for key, size, tick in self.index.changed_since(self._seen):
            self._policy.added(key, size)
            self._seen = tick
        return self._policy.victims(nbytes, self.index.pinned())

    def _drop(self, key: str) -> int | None:
        row = self.index.row(key)
        if row is None:
            return None
        # The file first: on a full device its space is what lets the index write at all.
        (self.root / row.path).unlink(missing_ok=True)
        self.index.delete(key)
        return row.file_bytes


def chunk_path(key: str) -> str:
    """Path of a chunk file, relative to the store."""
    return f"kv/{key[:2]}/{key}.safetensors"


def same_chunk(one: Chunk | Row, other: Chunk) -> bool:
    """Whether two chunks agree in all that a key stands for."""
    return (
        one.fingerprint == other.fingerprint
        and one.recipe == other.recipe
        and one.token_ids.tobytes() == other.token_ids.tobytes()
    )


def _checked_header(fd: int, row: Row) -> Header:
    header = read_header(fd, row.key)
    if (header.fingerprint, header.recipe) != (row.fingerprint, row.recipe):
        raise DamagedChunkError(row.key, "mismatch: the file holds a chunk of another model or recipe")
    if header.token_ids_digest != token_ids_digest(row.token_ids):
        raise DamagedChunkError(row.key, "mismatch: the file holds other token ids")
    return header
