"""What the chunks on disk take, by codec: an aggregate over the whole index, remembered for a while."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from blendkv.types import Recipe

_LEAST_S = 5.0
_PATIENCE_S = 0.5  # long enough for a small index, which is then up to date
_COST = 0.01
"""Most of the time that may go into counting: what took a second is counted anew after 100."""
_QUERY = "SELECT recipe, COUNT(*), SUM(file_bytes), SUM(nbytes) FROM chunks GROUP BY recipe"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodecUse:
    """Chunks of one codec, the bytes of their files, and of their K and V when decoded."""

    chunks: int = 0
    file_bytes: int = 0
    kv_bytes: int = 0


class CodecUsage:
    """Counts the chunks of the index at ``path`` by codec.

    It reads every row, on a thread and a connection of its own, so that neither look-ups nor who asks wait for it.
    ``recipe_of`` returns the recipe that a text of the index stands for.
    """

    def __init__(self, path: Path, recipe_of: Callable[[str], Recipe]) -> None:
        self._path = path
        self._recipe_of = recipe_of
        self._lock = threading.Lock()
        self._found: Mapping[str, CodecUse] = {}
        self._until = 0.0
        self._counting: threading.Thread | None = None
        self._failed = False

    def read(self) -> Mapping[str, CodecUse]:
        """By codec, a few seconds old, or older where counting takes long; nothing as long as it has not ended."""
        with self._lock:
            if self._counting is None and time.monotonic() >= self._until:
                self._counting = threading.Thread(target=self._run, name="blendkv-usage", daemon=True)
                self._counting.start()
            counting = self._counting
        if counting is not None:
            counting.join(_PATIENCE_S)
        return self._found

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            self._found = self._count()
        except sqlite3.Error as error:
            if not self._failed:
                _log.warning("chunks cannot be counted by codec (said once): %s: %s", self._path, error)
            self._failed = True
        ended = time.monotonic()
        with self._lock:
            self._until = ended + max(_LEAST_S, (ended - begun) / _COST)
            self._counting = None

    def _count(self) -> dict[str, CodecUse]:
        with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(_QUERY).fetchall()
        found: dict[str, CodecUse] = {}
        for recipe, chunks, file_bytes, kv_bytes in rows:
            codec = self._recipe_of(recipe).codec
            had = found.get(codec, CodecUse())
            found[codec] = CodecUse(had.chunks + chunks, had.file_bytes + file_bytes, had.kv_bytes + kv_bytes)
        return found
