"""Keeps a client connected: notices a daemon that is gone, and finds it again when it is back."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from blendkv.daemon.connection import Connection, DownError
from blendkv.errors import BlendKVError

FIRST_WAIT, LONGEST_WAIT = 0.05, 2.0
"""Seconds between attempts to connect: doubled from the first to the longest, with jitter."""
_TICK = 0.05  # seconds between two looks at what is to be released

_log = logging.getLogger(__name__)


class Link:
    """A connection that mends itself, on a thread of its own.

    Parameters
    ----------
    store
        The store's folder.
    client
        What this process calls itself.
    deadline
        Seconds that the daemon may take to answer what is quick.
    """

    def __init__(self, store: Path, client: str, deadline: float) -> None:
        self.store = store
        self.reconnects = 0
        """How often a daemon that was gone was found again."""
        self._client = client
        self._deadline = deadline
        self._current: Connection | None = None
        self._over: deque[tuple[Connection, int]] = deque()
        self._watcher: Callable[[Connection], None] = lambda connection: None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._lending: set[Connection] = set()  # those that have ended, and still lend
        self._quiet = threading.Event()
        self._lost_at = -math.inf
        self._told = False
        self._reason = f"no daemon answers at {store}"
        self._thread = threading.Thread(target=self._run, name="blendkv-daemon-link", daemon=True)
        try:
            self._current = self._connect()
        except DownError as error:
            self._note(error)
        self._thread.start()

    @property
    def up(self) -> bool:
        """Whether there is a connection, as far as is known."""
        current = self._current
        return current is not None and not current.ended

    def connection(self, grace: float = 0.0) -> Connection:
        """The connection; one that was lost less than ``grace`` seconds ago is waited for.

        Raises
        ------
        DownError
            If there is none now; it is being looked for.
        """
        end = (self._lost_at if self._current is None else time.monotonic()) + grace
        while True:
            current = self._current
            if current is not None and not current.ended:
                return current
            self._wake.set()
            left = end - time.monotonic()
            if left <= 0 or self._ending.wait(min(left, _TICK)):
                raise DownError(self._reason)

    def watch(self, watcher: Callable[[Connection], None]) -> None:
        """Call ``watcher`` with the connection that there is, and with every one that is made later."""
        self._watcher = watcher
        current = self._current
        if current is not None:
            watcher(current)

    def over(self, connection: Connection, loan: int) -> None:
        """A loan is over; the daemon is told soon. Safe in a finaliser: it takes no lock."""
        self._over.append((connection, loan))

    def close(self) -> None:
        """Ask nothing more. What is lent stays so until it is given back."""
        self._ending.set()
        self._wake.set()
        self._quiet.wait()

    def _connect(self) -> Connection:
        return Connection(self.store, self._client, self._deadline)

    def _run(self) -> None:
        wait = FIRST_WAIT
        while not self._ending.is_set():
            if self.up:
                wait = FIRST_WAIT
                self._wake.wait(_TICK)
                self._wake.clear()
            elif self._reconnect():
                continue
            else:
                self._ending.wait(min(wait, LONGEST_WAIT) * random.uniform(0.75, 1.25))
                wait *= 2
            self._tell_over()
        self._retire()
        self._tell_over()
        self._quiet.set()
        while self._lending:  # beyond `close`: who uses what was lent need not know of it
            self._wake.clear()
            self._wake.wait(_TICK)
            self._tell_over()

    def _reconnect(self) -> bool:
        """Try to connect; return whether it worked."""
        self._retire()
        try:
            self._current = found = self._connect()
        except BlendKVError as error:
            self._note(error)
            return False
        self._watcher(found)
        self.reconnects += 1
        self._told = False
        _log.warning("the daemon of %s answers again", self.store)
        return True

    def _retire(self) -> None:
        """Part with the connection that there was."""
        if self._current is not None:
            self._current.close()
            self._lending.add(self._current)
            self._lost_at = time.monotonic()
            self._current = None

    def _note(self, error: BlendKVError) -> None:
        self._reason = str(error)
        if not self._told:
            self._told = True
            _log.warning("%s; nothing stored is used until it does, and prompts are prefilled in full", error)

    def _tell_over(self) -> None:
        loans: dict[Connection, list[int]] = {}
        while self._over:
            connection, loan = self._over.popleft()
            loans.setdefault(connection, []).append(loan)
        for connection, numbers in loans.items():
            connection.release(numbers)
        self._lending = {connection for connection in self._lending if connection.lends}
