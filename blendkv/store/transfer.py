"""Moves chunk KVs between stores: a tar file of chunk files, which any tool can list and unpack."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendkv.errors import DamagedChunkError, InputError, StoreError
from blendkv.store.disk import DiskTier
from blendkv.store.filechunk import FileChunk
from blendkv.store.filereader import DiskReader
from blendkv.store.files import temporary_file
from blendkv.store.opening import open_disk

_NAME = re.compile(r"([0-9a-f]{64})\.safetensors")
MEMBER_LIMIT = 16 << 30
"""Bytes of a chunk file that is taken from an archive at most."""

Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class TransferReport:
    """Chunks that were written, their bytes, those that were there already, and (name, reason) of what was left out."""

    chunks: int
    bytes: int
    present: int
    left_out: tuple[tuple[str, str], ...]


@contextmanager
def opened(root: Path, disk_bytes: int | None = None, encrypt: bool | None = None) -> Iterator[DiskTier[FileChunk]]:
    """The disk of the store at ``root``; engines and a daemon may have it open as well."""
    disk, _ = open_disk(root, disk_bytes, None, _data, encrypt=encrypt)
    with closing(disk.index):
        yield disk


def export_chunks(
    disk: DiskTier[FileChunk], target: Path, progress: Progress | None = None, *, plain: bool = False
) -> TransferReport:
    """Write all chunk files of a store into the tar file ``target``, which is there as a whole or not at all.

    They are not encrypted there; of an encrypted store they are written only if ``plain`` says so.

    Raises
    ------
    InputError
        If ``target`` is there already, or the store is encrypted and ``plain`` is not set.
    StoreError
        If it cannot be written.
    """
    if target.exists():
        raise InputError(f"{target} is there already; give another name, or move it away")
    if disk.form.sealed and not plain:
        raise InputError(f"the store at {disk.root} is encrypted and an archive is not; give --plain to write it so")
    rows, chunks, size, left_out = disk.index.rows(), 0, 0, []
    try:
        with temporary_file(target) as (fd, temporary), os.fdopen(os.dup(fd), "wb") as out:
            with tarfile.open(fileobj=out, mode="w|") as archive:
                for number, row in enumerate(rows):
                    try:
                        size += _add(archive, disk, row.key)
                        chunks += 1
                    except DamagedChunkError as error:
                        left_out.append((row.key, error.reason))
                    if progress is not None:
                        progress(number + 1, len(rows))
            out.flush()
            os.fsync(fd)
            os.replace(temporary, target)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}; check rights and space") from error
    return TransferReport(chunks, size, 0, tuple(left_out))


def import_chunks(disk: DiskTier[FileChunk], source: Path, progress: Progress | None = None) -> TransferReport:
    """Store all chunk files of a tar file; each is verified, and what was stored stays whatever comes later.

    Raises
    ------
    InputError
        If ``source`` is no tar file, or not there.
    StoreFullError, StoreError
        If a chunk cannot be stored.
    """
    chunks = size = present = 0
    left_out: list[tuple[str, str]] = []
    try:
        with source.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                try:
                    chunk = _take(archive, member)
                    if disk.contains(chunk.key):
                        present += 1
                    else:
                        disk.put(chunk)
                        chunks, size = chunks + 1, size + chunk.data.nbytes
                except (DamagedChunkError, InputError) as error:
                    reason = error.reason if isinstance(error, DamagedChunkError) else str(error)
                    left_out.append((member.name, reason))
                if progress is not None:
                    progress(chunks + present + len(left_out), None)
    except tarfile.TarError as error:
        if not chunks + present + len(left_out):
            raise InputError(f"{source} is no tar file of chunk KVs ({error}); make one with store export") from error
        left_out.append((source.name, f"cut: {error}"))
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}") from error
    return TransferReport(chunks, size, present, tuple(left_out))


def _add(archive: tarfile.TarFile, disk: DiskTier[FileChunk], key: str) -> int:
    reader = disk.open(key)
    if reader is None:  # evicted meanwhile
        raise DamagedChunkError(key, "missing: it left the store meanwhile")
    member = tarfile.TarInfo(f"{key}.safetensors")
    member.size = reader.header.file_bytes
    with closing(reader):
        if isinstance(reader, DiskReader):
            with os.fdopen(os.dup(reader.fileno()), "rb") as file:
                archive.addfile(member, file)
        else:
            archive.addfile(member, io.BytesIO(reader.whole()))
    return member.size


def _take(archive: tarfile.TarFile, member: tarfile.TarInfo) -> FileChunk:
    named = _NAME.fullmatch(Path(member.name).name)
    if named is None or not member.isreg():
        raise InputError("it is no chunk file")
    if member.size > MEMBER_LIMIT:
        raise InputError(f"it has {member.size} bytes; {MEMBER_LIMIT} are allowed")
    stream = archive.extractfile(member)
    assert stream is not None
    data = _read(stream, member.size)
    if len(data) < member.size:
        raise DamagedChunkError(named[1], f"truncated: {len(data)} of {member.size} bytes")
    return FileChunk.parse(named[1], memoryview(data))


def _read(stream: Any, size: int) -> bytes:
    """Read ``size`` bytes as they come, not reserving what an archive only claims to have."""
    parts, left = [], size
    while left and (part := stream.read(min(left, 16 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _data(chunk: FileChunk) -> memoryview:
    return chunk.data
