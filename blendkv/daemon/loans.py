"""What a client knows of the chunks that it was lent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blendkv.errors import UnavailableChunkError


class Loan:
    """``ready`` layers of a lent chunk are there, counted from the first.

    ``alive`` says whether the daemon answers; it is asked after ``patience`` seconds without progress.
    """

    def __init__(self, number: int, ready: int, alive: Callable[[], bool], patience: float) -> None:
        self.number = number
        self.ready = ready
        self.lost: str | None = None
        self._alive = alive
        self._patience = patience
        self._changed = threading.Condition()

    def advance(self, layers: int) -> None:
        """So many layers are there now."""
        with self._changed:
            self.ready = max(self.ready, layers)
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """What is not there will not come."""
        with self._changed:
            self.lost = self.lost or reason
            self._changed.notify_all()

    def wait_for(self, key: str, index: int) -> None:
        """Wait until layer ``index`` of the chunk ``key`` is there.

        Raises
        ------
        UnavailableChunkError
            If it will not come: the daemon is gone or hangs, or the file behind it is damaged.
        """
        while not self._wait(index):
            # Without the lock: the answer comes by the thread that also brings the layers.
            if not self._alive():
                self.lose("the daemon does not answer")
        if index >= self.ready:
            raise UnavailableChunkError(key, self.lost or "it does not come")

    def _wait(self, index: int) -> bool:
        """Wait a while; return whether there is nothing more to wait for."""
        with self._changed:
            return self._changed.wait_for(lambda: index < self.ready or self.lost is not None, self._patience)
