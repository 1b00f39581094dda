"""How long calls take: histograms that cost about a microsecond to add to."""

from __future__ import annotations

import itertools
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds for what crosses a network; one more bucket holds what is above."""
LOCAL_BUCKETS = (0.00001, 0.000025, 0.0001, 0.00025, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)
"""The same for memory, disk and codecs."""


@dataclass(frozen=True)
class Latency:
    """Calls by the upper ``bounds`` of their seconds, and the seconds of all together.

    ``counts`` are not cumulative, and one more than bounds: the last is of what is above all of them.
    """

    counts: tuple[int, ...]
    seconds: float
    bounds: tuple[float, ...] = LATENCY_BUCKETS

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """(Upper bound in seconds, calls up to it), the last bound infinite."""
        return list(zip((*self.bounds, math.inf), itertools.accumulate(self.counts), strict=True))


class Timings:
    """Histograms by name, all with the same upper ``bounds``. Safe to use from several threads."""

    def __init__(self, bounds: tuple[float, ...] = LOCAL_BUCKETS) -> None:
        self._bounds = bounds
        self._found: dict[str, tuple[list[int], list[float]]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Count a call."""
        place = bisect_left(self._bounds, seconds)
        with self._lock:
            found = self._found.get(name)
            if found is None:
                found = self._found[name] = ([0] * (len(self._bounds) + 1), [0.0])
            found[0][place] += 1
            found[1][0] += seconds

    def timed(self, name: str) -> Timed:
        """Count the block that runs in it, if it ends well: of what fails there are counts."""
        return Timed(self, name)

    def read(self) -> Mapping[str, Latency]:
        """What was counted so far, by name."""
        with self._lock:
            return {name: Latency(tuple(c), total[0], self._bounds) for name, (c, total) in self._found.items()}


class Timed:
    """A block that is timed. A class, as `contextlib.contextmanager` costs three times as much."""

    __slots__ = ("_begun", "_name", "_timings")

    def __init__(self, timings: Timings, name: str) -> None:
        self._timings = timings
        self._name = name

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._timings.add(self._name, time.perf_counter() - self._begun)


CODEC_TIMINGS = Timings()
"""Of this process, by ``CODEC encode`` and ``CODEC decode``; raw chunk KVs are neither."""
