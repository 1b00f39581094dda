"""What a client knows of the chunks that it was lent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blendkv.daemon.receiver import Waiter
from blendkv.errors import UnavailableChunkError


class Loan:
    """``ready`` layers of a lent chunk are there, counted from the first.

    Parameters
    ----------
    number
        The daemon's.
    ready
        Layers that were there when it was lent.
    wait
        Waits until something is over, so many seconds at most, and says whether it is (`Receiver.wait`).
    alive
        Whether the daemon answers; it is asked after ``patience`` seconds without progress.
    patience
        Seconds.
    """

    def __init__(
        self,
        number: int,
        ready: int,
        wait: Callable[[Waiter, float], bool],
        alive: Callable[[], bool],
        patience: float,
    ) -> None:
        self.number = number
        self.ready = ready
        self.layers = ready
        """Layers that are to come, those that are there included."""
        self.lost: str | None = None
        self._wait = wait
        self._alive = alive
        self._patience = patience
        self._waiters: list[Waiter] = []
        self._lock = threading.Lock()

    @property
    def coming(self) -> bool:
        """Whether further layers are on their way."""
        return self.lost is None and self.ready < self.layers

    def advance(self, layers: int) -> None:
        """So many layers are there now."""
        with self._lock:
            self.ready = max(self.ready, layers)
            self._tell()

    def lose(self, reason: str) -> None:
        """What is not there will not come."""
        with self._lock:
            self.lost = self.lost or reason
            self._tell()

    def wait_for(self, key: str, index: int) -> None:
        """Wait until layer ``index`` of the chunk ``key`` is there.

        Raises
        ------
        UnavailableChunkError
            If it will not come: the daemon is gone or hangs, or the file behind it is damaged.
        """
        while index >= self.ready and self.lost is None:
            with self._lock:
                before, lost = self.ready, self.lost
                self._waiters.append(waiter := Waiter())
            if index >= before and lost is None and not self._wait(waiter, self._patience) and not self._alive():
                self.lose("the daemon does not answer")
        if index >= self.ready:
            raise UnavailableChunkError(key, self.lost or "it does not come")

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.finish()
