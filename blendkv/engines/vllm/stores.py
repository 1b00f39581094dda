"""One open store per folder and process, shared by the halves of a connector that live in one process."""

from __future__ import annotations

import threading
from pathlib import Path

from blendkv.daemon.opening import open_store
from blendkv.store.door import Store

_OPEN: dict[Path, tuple[Store, int]] = {}
_LOCK = threading.Lock()


def acquire(folder: Path, memory_bytes: int, policy: str | None = None) -> Store:
    """Open the store, or join the one that is open; give it back with `release`.

    ``policy`` is that of a store in this process; None: the usual one.
    """
    path = folder.absolute()
    with _LOCK:
        store, users = _OPEN.get(path) or (open_store(path, memory_bytes, policy=policy), 0)
        _OPEN[path] = store, users + 1
        return store


def release(folder: Path) -> None:
    """One user less; the last one closes the store."""
    path = folder.absolute()
    with _LOCK:
        store, users = _OPEN[path]
        if users > 1:
            _OPEN[path] = store, users - 1
            return
        del _OPEN[path]
    store.close()
