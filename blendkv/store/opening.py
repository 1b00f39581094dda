"""Opens a store's directory: refuses what is not ours, makes what is missing, mends what a crash left."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blendkv.errors import InputError, StoreError
from blendkv.market.base import EvictionPolicy
from blendkv.store.base import HeldChunk
from blendkv.store.disk import DiskTier
from blendkv.store.files import make_directory
from blendkv.store.forms import form_of
from blendkv.store.index import Index
from blendkv.store.quotas import Quotas
from blendkv.store.repair import sweep
from blendkv.store.reports import RepairReport

INDEX_NAME = "index.sqlite"
DAEMON_NAMES = ("daemon.sock", "daemon.lock")
"""A daemon's socket, and the lock of the one daemon that there may be."""
PRICES_NAME = "daemon.prices"
"""Where a daemon remembers what its memory held."""
_OURS = {"kv", *DAEMON_NAMES, PRICES_NAME, INDEX_NAME, *(f"{INDEX_NAME}-{part}" for part in ("wal", "shm", "journal"))}


def open_disk(
    root: Path,
    limit: int | None,
    policy: EvictionPolicy | None,
    encode: Callable[[HeldChunk], memoryview],
    quotas: Quotas | None = None,
    encrypt: bool | None = None,
) -> tuple[DiskTier[HeldChunk], RepairReport]:
    """Open or create the store at ``root``. Processes that open it at the same time take turns.

    ``encode`` returns the file of a chunk as the store's memory holds it. ``encrypt`` says whether the store is to be
    encrypted, with the key in ``BLENDKV_ENCRYPTION_KEY``; None: as it is, a new one is not.

    Raises
    ------
    InputError
        If ``root`` is a file, or a directory with other things in it and no index; if the store is encrypted and the
        key is missing or another one, or ``encrypt`` is not how it is.
    StoreMismatchError
        If a newer version of BlendKV made it.
    StoreError
        If it cannot be read or written.
    """
    if root.exists() and not root.is_dir():
        raise InputError(f"{root} is a file; a store needs a directory of its own")
    try:
        make_directory(root)
        with _turn(root):
            return _open(root, limit, policy, encode, quotas or Quotas(), encrypt)
    except OSError as error:
        raise StoreError(f"cannot open the store at {root}: {error.strerror}; check the directory's rights") from error


def _open(
    root: Path,
    limit: int | None,
    policy: EvictionPolicy | None,
    encode: Callable[[HeldChunk], memoryview],
    quotas: Quotas,
    encrypt: bool | None,
) -> tuple[DiskTier[HeldChunk], RepairReport]:
    _refuse_foreign(root)
    index = Index(root / INDEX_NAME)
    try:
        make_directory(root / "kv")
        form = form_of(root, index, encrypt)
        index.cells = form.cells
        disk = DiskTier(root, index, limit, policy, encode, form, quotas)
        return disk, sweep(disk)
    except BaseException:
        index.close()
        raise


def _refuse_foreign(root: Path) -> None:
    """Refuse a directory of something else. With an index of ours in it, other files are its owner's business."""
    index = root / INDEX_NAME
    if index.exists() and index.stat().st_size:
        return
    foreign = sorted(set(os.listdir(root)) - _OURS)
    if foreign:
        raise InputError(
            f"{root} is not a store and holds other files ({foreign[0]}, ...); give it a directory of its own"
        )


@contextmanager
def _turn(root: Path) -> Iterator[None]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
