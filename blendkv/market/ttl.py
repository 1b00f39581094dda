"""A session's blocks are pinned for a time after each use: the rule of Continuum, by the clock alone."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from itertools import chain

from blendkv.errors import InputError
from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.eviction import AdmitsAll, enough
from blendkv.market.ranking import Ranking

TTLS: Mapping[str, float] = {"agent": 30.0, "chat": 60.0}
"""Seconds by workload class: a tool's answer, a reader's next message; other classes do not pin."""


class TtlPolicy(AdmitsAll):
    """Least recently used, but blocks of a session stay until a time to live after their last use has run out.

    After Continuum, which pins the KV of an agent while its tool runs. A use pins if it has a session and its class a
    time to live; one that pins for less does not shorten an earlier one. If all that is not pinned does not suffice,
    pinned blocks leave too, those first whose time runs out first.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    ttls
        Seconds by workload class, 0 or more.

    Raises
    ------
    InputError
        If a time to live is below 0 or not finite.
    """

    def __init__(self, capacity: int, ttls: Mapping[str, float] = TTLS) -> None:
        for workload, ttl in ttls.items():
            if not 0 <= ttl < math.inf:
                raise InputError(f"the TTL of {workload} is {ttl}; a finite number of seconds, 0 or more, is allowed")
        self._ttls = dict(ttls)
        self._ticks = 0
        self._used: dict[str, int] = {}
        self._free, self._pinned = Ranking(), Ranking()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` was used, and has a new size."""
        self._ticks += 1
        self._used[key] = self._ticks
        until = now + self._ttls.get(use.workload, 0.0) if use.session else now
        if key in self._pinned:
            until = max(until, self._pinned.rank(key))
        if until > now:
            if key in self._free:
                self._free.drop(key)
            self._pinned.set(key, item.nbytes, until)
        else:
            if key in self._pinned:
                self._pinned.drop(key)
            self._free.set(key, item.nbytes, self._ticks)

    def touched(self, key: str, use: Use, now: float) -> None:
        """``key`` was used."""
        for blocks in (self._free, self._pinned):
            if key in blocks:
                self.added(key, Item(blocks.nbytes(key), 0.0), use, now)
                return

    def removed(self, key: str, now: float) -> None:
        """Forget ``key`` and its pin."""
        self._used.pop(key, None)
        for blocks in (self._free, self._pinned):
            if key in blocks:
                blocks.drop(key)

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """Keys outside ``keep``, unpinned ones first, until ``nbytes`` bytes are freed."""
        while (key := self._pinned.lowest()) is not None and self._pinned.rank(key) <= now:
            self._free.set(key, self._pinned.nbytes(key), self._used[key])
            self._pinned.drop(key)
        return enough(chain(self._free.walk(), self._pinned.walk()), nbytes, keep)


POLICIES.add("ttl")(TtlPolicy)
