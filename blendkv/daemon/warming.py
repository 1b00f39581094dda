"""Brings chunks to a daemon's memory when it starts, the most valuable ones, and remembers which those are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from blendkv.daemon.arena import held_bytes
from blendkv.daemon.pricefile import MOST_ROWS, drop_prices, read_prices, write_prices
from blendkv.daemon.store import ImageStore
from blendkv.daemon.uses import acting
from blendkv.errors import StoreError
from blendkv.market.base import NOBODY, Use

EVERY = 600.0
"""Seconds between two writes of the prices: what a crash may lose."""
_AT_ONCE = 8
"""Loads that wait or run: each has a file open, and what a client asks for goes before them in the queue only."""
_PAUSE = 0.005  # seconds
_PAGE = 256  # rows of the index

_log = logging.getLogger(__name__)


class Warmth:
    """A thread that fills the memory of ``store`` once, then writes down what lies there from time to time.

    First come the chunks that the last daemon held, the dearest first, then those used last. Nothing leaves memory for
    them, and it counts as no use. Without a policy that knows prices there is the last use alone, and what was used
    longest ago comes first: so the policy sees the order of before.

    Parameters
    ----------
    root
        The store's folder.
    store
        To warm.
    fill
        Whether to fill it; else prices are only written.
    """

    def __init__(self, root: Path, store: ImageStore, fill: bool) -> None:
        self.brought = 0
        """Chunks that came to memory."""
        self.filled = not fill
        """Whether no more are to come."""
        self._root = root
        self._store = store
        self._fill = fill
        self._ending = threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._run, name="blendkv-warm", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End, and write down what the store holds now."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self._write()

    def _run(self) -> None:
        try:
            if self._fill:
                self._warm()
        except StoreError as error:
            _log.warning("memory was not warmed to its end: %s", error)
        self.filled = True
        while not self._ending.wait(EVERY):
            self._write()

    def _warm(self) -> None:
        for key, use in self._chosen():
            while self._store.loading >= _AT_ONCE and not self._ending.wait(_PAUSE):
                pass
            if self._ending.is_set():
                return
            with acting(use):
                self.brought += self._store.warm(key)
        _log.info("%d chunk KVs were brought to memory", self.brought)

    def _chosen(self) -> list[tuple[str, Use]]:
        """The chunks that fit together, in the order in which they are to come."""
        priced = self._store.ranked(1) is not None
        chosen, room = [], self._store.arena.free_bytes
        for key, size, use in self._candidates(priced):
            if held_bytes(size) > room:
                break
            room -= held_bytes(size)
            chosen.append((key, use))
        return chosen if priced else chosen[::-1]

    def _candidates(self, priced: bool) -> Iterator[tuple[str, int, Use]]:
        """(key, bytes of its file, whose it was), the most valuable first."""
        index, known = self._store.index, set()
        for chunk in (read_prices(self._root) or []) if priced else []:
            place = index.place(chunk.key)
            if place is not None:
                known.add(chunk.key)
                yield chunk.key, place[1], Use(chunk.workload)
        page = index.newest(_PAGE)  # not all at once: look-ups wait for the index meanwhile
        while page:
            for row in page:
                if row.key not in known:
                    yield row.key, row.file_bytes, NOBODY
            page = index.newest(_PAGE, page[-1].tick)

    def _write(self) -> None:
        try:
            held = self._store.ranked(MOST_ROWS)
            if held is None:
                drop_prices(self._root)
            else:
                write_prices(self._root, held)
        except OSError as error:
            if not self._told:
                self._told = True
                _log.warning("prices cannot be written to %s (%s), said once", self._root, error.strerror)
