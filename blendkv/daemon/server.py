"""The daemon: accepts clients, serves each on a thread of its own, ends in order."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from blendkv.daemon import address
from blendkv.daemon import messages as m
from blendkv.daemon.session import Session
from blendkv.daemon.store import ImageStore, raise_file_limit
from blendkv.daemon.uses import Uses
from blendkv.daemon.warming import Warmth
from blendkv.daemon.wire import Wire
from blendkv.market.base import USUAL
from blendkv.store.quotas import Quotas
from blendkv.store.remote import open_remote

_POOL_THREADS, _WRITER_THREADS = 8, 4
_SEND_TIMEOUT = 0.5  # seconds: a client that reads nothing for so long is cut off; loads for others wait behind it

_FULL_SECONDS = 0.5  # to wait until files are closed, where too many are open
# Behind engines where cores are short. Not more: a thread that holds the interpreter's lock holds up pings.
_NICER = 5
_log = logging.getLogger(__name__)


class Daemon:
    """Serves the store at ``root`` on the socket in its folder. Use it with ``with``, or `close` it.

    Parameters
    ----------
    root
        The store's folder; made if there is none.
    memory_bytes, disk_bytes
        Limits in bytes; no disk limit by default.
    policy
        Name of the eviction policy; see `ImageStore`.
    mode
        File mode of the socket: who may connect.
    remotes, namespace
        URLs of remote tiers, fastest first, and whose chunks are seen there; see `blendkv.store.remote.open_remote`.
    quotas
        Bytes that each tenant may have in memory, and on disk; none by default.
    encrypt
        Whether what is on disk is encrypted, with the key in ``BLENDKV_ENCRYPTION_KEY``; by default as the store is.
    prefill_rate
        Tokens per second that engines prefill; see `blendkv.store.KVStore.open`.
    warm
        Whether to fill memory from disk at the start (`blendkv.daemon.warming`).

    Raises
    ------
    InputError
        If another daemon runs for this store, an argument cannot be used, or the store's key is missing or another one.
    StoreMismatchError, StoreError
        If the store cannot be opened, or the socket not be made.
    """

    def __init__(
        self,
        root: Path,
        memory_bytes: int,
        disk_bytes: int | None = None,
        policy: str = USUAL,
        mode: int = 0o600,
        remotes: Sequence[str] = (),
        namespace: str = "default",
        quotas: Quotas | None = None,
        encrypt: bool | None = None,
        prefill_rate: float | None = None,
        warm: bool = False,
    ) -> None:
        raise_file_limit()
        with ExitStack() as opened:
            tiers = [open_remote(url, namespace=namespace) for url in remotes]
            for tier in tiers:
                opened.callback(tier.close)
            self.store = ImageStore(root, memory_bytes, disk_bytes, policy, tiers, quotas, encrypt, prefill_rate)
            opened.callback(self.store.close)
            opened.enter_context(address.ownership(root))
            self._socket = address.listen(root, mode)
            opened.callback(self._stop_listening)
            self._opened = opened.pop_all()
        self.root = root
        self.policy = policy
        self.uses = Uses()
        self._shared = bool(mode & 0o066)  # then the file's mode alone says who may connect
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="blendkv-daemon")
        self._writers = ThreadPoolExecutor(_WRITER_THREADS, "blendkv-put", _step_back)
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._closing = False
        self._warmth = Warmth(root, self.store, warm)
        self._warmth.start()

    def serve(self) -> None:
        """Accept clients until `stop` or `close` is called by another thread."""
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError as error:
                if self._stopping:
                    return
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    raise
                _log.warning("a client could not be let in: %s", error.strerror)
                time.sleep(_FULL_SECONDS)
                continue
            pid, uid = address.peer(client)
            if not self._shared and uid not in (os.geteuid(), 0) and os.geteuid() != 0:
                _log.warning("process %d of user %d was refused", pid, uid)
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), name=f"blendkv-client-{pid}", daemon=True).start()

    def stats(self) -> m.Stats:
        """What the store and the daemon hold and did."""
        with self._lock:
            sessions = list(self._sessions)
        loans = sum(session.loans for session in sessions)
        counts = loans, len(sessions), self.store.loading, self.store.arena.free_bytes
        return m.Stats(self.store.stat(), *counts, self.policy, self.uses.strange)

    def stop(self) -> None:
        """Let `serve` return."""
        self._stopping = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, write what waits, close the store. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            sessions = list(self._sessions)
        self.stop()
        for session in sessions:
            session.close()
        self._writers.shutdown()
        self._pool.shutdown()
        self._warmth.close()
        self._opened.close()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, client: socket.socket) -> None:
        address.send_timeout(client, _SEND_TIMEOUT)
        session = Session(self, self.store, Wire(client, m.REQUESTS), self._pool, self._writers)
        with self._lock:
            if self._closing:
                client.close()
                return
            self._sessions.add(session)
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.discard(session)

    def _stop_listening(self) -> None:
        self._socket.close()
        with suppress(OSError):
            address.socket_path(self.root).unlink()


def _step_back() -> None:
    """Lower the priority of the thread that calls: nobody waits for a put as one waits for a get."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
