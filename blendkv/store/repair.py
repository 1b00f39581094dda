"""Mends what a crash leaves behind: files without a row, rows without a file, temporary files without a writer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from blendkv.errors import DamagedChunkError
from blendkv.store.chunkfile import read_header, read_tensor
from blendkv.store.disk import DiskTier, chunk_path
from blendkv.store.files import TEMPORARY_SUFFIX, delete_leftover
from blendkv.store.index import Row
from blendkv.store.reports import RepairReport
from blendkv.types import as_token_ids, chunk_key

_KEY = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)


def sweep(disk: DiskTier) -> RepairReport:
    """Bring files and rows together again. Safe while other processes use the store.

    A whole file without a row is read, verified and adopted; any other is deleted. Files that do not look like ours are
    left alone.

    Raises
    ------
    StoreMismatchError
        If a file without a row was written by a newer version of BlendKV.
    """
    # Under the write lock no other process is between renaming a file and adding its row.
    with disk.index.transaction():
        known = disk.index.keys()
        present, temporary = _scan(disk.root)
        lost = known - present.keys()
        for key in lost:
            disk.index.delete(key)
    orphans = sorted(present.keys() - known, key=lambda key: present[key])
    adopted = sum(_adopt(disk, key) for key in orphans)
    report = RepairReport(
        adopted=adopted,
        deleted_files=len(orphans) - adopted,
        dropped_rows=len(lost),
        temporary=sum(delete_leftover(path) for path in temporary),
    )
    if report:
        _log.warning("store %s repaired: %s", disk.root, report)
    return report


def _scan(root: Path) -> tuple[dict[str, float], list[Path]]:
    present: dict[str, float] = {}
    temporary: list[Path] = []
    for entry in _files(root / "kv"):
        key = entry.name.removesuffix(".safetensors")
        if entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX):
            temporary.append(Path(entry.path))
        elif _KEY.fullmatch(key) and Path(entry.path) == root / chunk_path(key):
            present[key] = entry.stat(follow_symlinks=False).st_mtime
    return present, temporary


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as groups:
        for group in groups:
            if group.is_dir():
                with os.scandir(group.path) as files:
                    yield from files


def _adopt(disk: DiskTier, key: str) -> bool:
    """Verify a file outside the lock, then give it its row, or delete it, under the lock."""
    path = disk.root / chunk_path(key)
    try:
        row: Row | None = _read_row(path, key)
    except DamagedChunkError as error:
        _log.info("file without a row: %s", error)
        row = None
    with disk.index.transaction():
        if disk.index.row(key) is not None:  # its writer came back meanwhile
            return True
        if row is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            disk.index.insert(row)
    return row is not None


def _read_row(path: Path, key: str) -> Row:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedChunkError(key, f"unreadable: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        header = read_header(fd, key)
        tensors = {name: read_tensor(fd, key, name, span) for name, span in header.tensors.items()}
    finally:
        os.close(fd)
    token_ids = as_token_ids(tensors["token_ids"].numpy())
    if chunk_key(header.fingerprint, header.recipe, token_ids) != key:
        raise DamagedChunkError(key, "mismatch: the key does not belong to this content")
    times = (status.st_mtime, status.st_mtime)
    return Row(
        key, header.fingerprint, header.recipe, token_ids, header.nbytes, status.st_size, chunk_path(key), *times
    )
