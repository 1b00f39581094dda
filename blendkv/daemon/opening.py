"""One call for a store, wherever it is: in its daemon if one runs, else in this process."""

from __future__ import annotations

import logging
from pathlib import Path

from blendkv.daemon import address
from blendkv.daemon.client import DEADLINE, DaemonStore
from blendkv.market.base import USUAL
from blendkv.store.door import Store
from blendkv.store.tiered import KVStore

_log = logging.getLogger(__name__)


def open_store(
    path: Path | str,
    memory_bytes: int,
    disk_bytes: int | None = None,
    deadline: float = DEADLINE,
    encrypt: bool | None = None,
    policy: str | None = None,
) -> Store:
    """Open the store at ``path``: by its daemon if one listens there, else in this process.

    A daemon that listens and does not answer is waited for by nobody: it serves as soon as it does.

    Parameters
    ----------
    path
        The store's folder.
    memory_bytes, disk_bytes
        Limits in bytes for a store in this process; a daemon has limits of its own.
    deadline
        Seconds in which a daemon must show that it lives.
    encrypt
        As for `KVStore.open`; a daemon has opened its store already.
    policy
        As for `KVStore.open`, whose own by default; a daemon has one already.

    Raises
    ------
    InputError, StoreMismatchError, StoreError
        As `KVStore.open`.
    """
    root = Path(path).expanduser()
    if address.listens(root):
        if disk_bytes is not None:
            _log.warning("the store %s belongs to a daemon, whose own limit holds: --disk is not used", root)
        if encrypt:
            _log.warning("the store %s belongs to a daemon, which decides on encryption: --encrypt is not used", root)
        if policy is not None:
            _log.warning("the store %s belongs to a daemon, which has a policy: --policy is not used", root)
        return DaemonStore(root, deadline)
    if address.socket_path(root).exists():
        _log.warning("no daemon listens at %s any more: the store is opened in this process", root)
    rule = USUAL if policy is None else policy
    return KVStore.open(root, memory_bytes=memory_bytes, disk_bytes=disk_bytes, encrypt=encrypt, policy=rule)
