"""A circuit breaker: after failures in a row a place is left alone for a while, then probed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Says whether a call may go on. Safe to use from several threads.

    After ``failures`` failures in a row the circuit opens for ``first_s`` seconds, twice as long every time that the
    place turns out to be still down, ``longest_s`` at most; each time is shortened at random by up to half, so that
    many clients do not come back at once. Then one probe is asked for. If it succeeds the circuit is closed on trial:
    the first failure opens it again, the first success ends the trial.

    Parameters
    ----------
    failures
        How many failures in a row open it.
    first_s, longest_s
        Seconds.
    clock, chance
        Seconds that only grow, and numbers from 0 to 1.
    """

    def __init__(
        self,
        failures: int,
        first_s: float,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._failures, self._first_s, self._longest_s = failures, first_s, longest_s
        self._clock, self._chance = clock, chance
        self._lock = threading.Lock()
        self._state: State = "closed"
        self._in_a_row = 0
        self._back_offs = 0
        self._until = 0.0
        self.openings = 0
        """How often it went from closed to open."""

    @property
    def state(self) -> State:
        """``closed``: calls go through; ``open``: they do not; ``half_open``: nor do they, and a probe is under way."""
        return self._state

    @property
    def wait_s(self) -> float:
        """Seconds until the next probe; 0 if it is due or not needed."""
        with self._lock:
            return max(0.0, self._until - self._clock()) if self._state == "open" else 0.0

    def admit(self) -> Literal["go", "probe", "refuse"]:
        """What a call should do. ``probe`` is said once: who is told so must report with `probed`."""
        with self._lock:
            if self._state == "closed":
                return "go"
            if self._state == "half_open" or self._clock() < self._until:
                return "refuse"
            self._state = "half_open"
            return "probe"

    def succeeded(self) -> None:
        """A call went well."""
        with self._lock:
            if self._state == "closed":  # one that began before it opened says nothing new
                self._in_a_row = self._back_offs = 0

    def failed(self) -> bool:
        """A call failed; return whether that opened the circuit."""
        with self._lock:
            if self._state != "closed":
                return False
            self._in_a_row += 1
            if self._in_a_row < self._failures:
                return False
            self.openings += 1
            self._open()
            return True

    def probed(self, well: bool) -> None:
        """The probe's outcome."""
        with self._lock:
            if self._state != "half_open":
                return
            if well:
                self._state, self._in_a_row = "closed", self._failures - 1
            else:
                self._open()

    def _open(self) -> None:
        span = min(self._longest_s, self._first_s * 2.0**self._back_offs)
        if span < self._longest_s:
            self._back_offs += 1
        self._state, self._in_a_row = "open", 0
        self._until = self._clock() + span * (1 - self._chance() / 2)
