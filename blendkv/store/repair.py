"""Mends what a crash leaves behind: files without a row, rows without a file, temporary files without a writer."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from blendkv.errors import DamagedChunkError
from blendkv.store.disk import DiskTier, chunk_path
from blendkv.store.filereader import open_file
from blendkv.store.files import TEMPORARY_SUFFIX, delete_leftover
from blendkv.store.forms import Form
from blendkv.store.index import Row
from blendkv.store.reports import RepairReport

_KEY = re.compile(r"[0-9a-f]{64}")
_GROUPS = tuple(f"{group:02x}" for group in range(256))
"""Folders of chunk files, each looked at alone: the keys of a million chunks would take hundreds of megabytes."""

_log = logging.getLogger(__name__)


def sweep(disk: DiskTier[Any]) -> RepairReport:
    """Bring files and rows together again. Safe while other processes use the store.

    A whole file without a row is read, verified and adopted; any other is deleted. Files that do not look like ours are
    left alone.

    Raises
    ------
    StoreMismatchError
        If a file without a row was written by a newer version of BlendKV.
    """
    lost = 0
    orphans: dict[str, float] = {}
    temporary: list[Path] = []
    # Under the write lock no other process is between renaming a file and adding its row.
    with disk.index.transaction():
        for group in _GROUPS:
            known = disk.index.keys(group)
            present, leftovers = _scan(disk.root, group, disk.form.suffix)
            for key in known - present.keys():
                disk.index.delete(key)
                lost += 1
            orphans |= {key: present[key].stat(follow_symlinks=False).st_mtime for key in present.keys() - known}
            temporary += leftovers
        recounted = disk.index.recount()
    adopted = sum(_adopt(disk, key) for key in sorted(orphans, key=lambda key: orphans[key]))
    report = RepairReport(
        adopted=adopted,
        deleted_files=len(orphans) - adopted,
        dropped_rows=lost,
        temporary=sum(delete_leftover(path) for path in temporary),
        recounted=recounted,
    )
    if report:
        _log.warning("store %s repaired: %s", disk.root, report)
    return report


def _scan(root: Path, group: str, suffix: str) -> tuple[dict[str, os.DirEntry[str]], list[Path]]:
    """The chunk files of a group by key, and the temporary files in its folder."""
    present: dict[str, os.DirEntry[str]] = {}
    temporary: list[Path] = []
    with suppress(FileNotFoundError), os.scandir(root / "kv" / group) as files:
        for entry in files:
            key = entry.name.removesuffix(suffix)
            if entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX):
                temporary.append(Path(entry.path))
            elif _KEY.fullmatch(key) and Path(entry.path) == root / chunk_path(key, suffix):
                present[key] = entry
    return present, temporary


def _adopt(disk: DiskTier[Any], key: str) -> bool:
    """Verify a file outside the lock, then give it its row, or delete it, under the lock."""
    path = disk.root / chunk_path(key, disk.form.suffix)
    try:
        row: Row | None = _read_row(path, key, disk.form)
    except DamagedChunkError as error:
        _log.info("file without a row: %s", error)
        row = None
    with disk.index.transaction():
        if disk.index.place(key) is not None:  # its writer came back meanwhile
            return True
        if row is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            disk.index.insert(row)
    return row is not None


def _read_row(path: Path, key: str, form: Form) -> Row:
    fd = open_file(path, key)
    try:
        status = os.fstat(fd)
        header, ids = form.adopt(fd, key)
    finally:
        os.close(fd)
    relative, when = chunk_path(key, form.suffix), status.st_mtime
    return Row(key, header.fingerprint, header.recipe, ids, header.nbytes, status.st_size, relative, when, when)
