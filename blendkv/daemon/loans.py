"""What a client knows of the chunks that it was lent."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blendkv.errors import StoreError, UnavailableChunkError


class Loan:
    """``ready`` layers of a lent chunk are there, counted from the first.

    Parameters
    ----------
    number
        The daemon's.
    ready
        Layers that were there when it was lent.
    """

    def __init__(self, number: int, ready: int) -> None:
        self.number = number
        self.lost: str | None = None
        """Why no more layers will come."""
        self._ready = self._layers = ready
        self._word: memoryview | None = None
        self._ask: Callable[[int], str | None] = lambda layer: "it was not lent whole"
        self._lock = threading.Lock()

    def expect(self, layers: int, word: memoryview, ask: Callable[[int], str | None]) -> None:
        """It is of a chunk of ``layers`` layers, those to come included.

        Parameters
        ----------
        layers
            Of the chunk.
        word
            Where the daemon writes how many are there.
        ask
            Waits until a layer is there, and returns None, or what has become of it.
        """
        with self._lock:
            self._layers, self._word, self._ask = layers, word, ask

    @property
    def ready(self) -> int:
        """Layers that are there."""
        if self._word is not None and self._ready < self._layers:
            with self._lock:  # what is read in the layers is read after the word: the lock keeps that order
                self._ready = max(self._ready, min(self._layers, int.from_bytes(self._word, "little")))
        return self._ready

    def lose(self, reason: str) -> None:
        """What is not there will not come."""
        self.lost = self.lost or reason

    def wait_for(self, key: str, index: int) -> None:
        """Wait until layer ``index`` of the chunk ``key`` is there.

        Raises
        ------
        UnavailableChunkError
            If it will not come: the daemon is gone or hangs, or the file behind it is damaged.
        """
        while index >= self.ready and self.lost is None:
            try:
                lost = self._ask(index)
            except StoreError as error:
                lost = str(error)
            if lost is not None:
                self.lose(lost)
        if index >= self.ready:
            raise UnavailableChunkError(key, self.lost or "it does not come")
