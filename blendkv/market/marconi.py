"""Recency plus FLOP efficiency: the eviction rule of Marconi."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterator
from typing import NamedTuple

from blendkv.errors import InputError
from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.chains import Chains
from blendkv.market.eviction import AdmitsAll, enough
from blendkv.market.greedy import density
from blendkv.market.shelves import shelf_of, worth_of


class _Held(NamedTuple):
    """A held block: its bytes, its own efficiency, the block before it, its shelf, and when it was used last."""

    nbytes: int
    efficiency: float
    after: str
    shelf: int
    used: float
    tick: int


class MarconiPolicy(AdmitsAll):
    """The lowest recency + alpha x efficiency goes first (Marconi, arXiv 2411.19379).

    Recency is the time of the last use, efficiency the seconds saved per byte, which stand for the paper's FLOPs; both
    are scaled to run from 0 to 1 over what is held at the time. A block's efficiency is at least that of the held
    blocks after it in the prefix, as the paper evicts a branch from its end, and is taken in steps of 2^(1/8). Of equal
    scores, what was used longest ago goes first.

    The paper tunes alpha by replaying the first requests offline; here it is fixed. Its rule of admission decides which
    recurrent states to keep, of which one saves a whole prefix; it takes in all KV, and so does this policy.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    alpha
        Weight of efficiency against recency, 0 or more; at 0 this is LRU. Below 1 what was used longest ago leaves in
        the end, however efficient it is.

    Raises
    ------
    InputError
        If alpha is below 0.
    """

    def __init__(self, capacity: int, alpha: float = 0.5) -> None:
        if not alpha >= 0:
            raise InputError(f"alpha is {alpha}; 0 or more is allowed")
        self.alpha = alpha
        self._ticks = 0
        self._held: dict[str, _Held] = {}
        self._shelves: dict[int, OrderedDict[str, None]] = {}
        self._chains = Chains()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` is held from now on, at its new size and efficiency."""
        self._take_down(key)
        self._put(key, item.nbytes, density(item), item.after, now)

    def touched(self, key: str, use: Use, now: float) -> None:
        """``key`` was used last."""
        held = self._take_down(key)
        if held is not None:
            self._put(key, held.nbytes, held.efficiency, held.after, now)

    def removed(self, key: str, now: float) -> None:
        """Forget ``key``."""
        if self._take_down(key) is not None:
            self._chains.leave(key)

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The keys outside ``keep`` of the lowest scores until ``nbytes`` bytes are freed."""
        if not self._shelves:
            return []
        oldest = min(self._held[next(iter(keys))].used for keys in self._shelves.values())
        worths = [worth_of(shelf) for shelf in self._shelves]
        low, high = min(worths), max(worths)
        span, spread = now - oldest, high - low

        def scored(shelf: int) -> Iterator[tuple[float, int, str]]:
            base = self.alpha * (worth_of(shelf) - low) / spread if spread > 0 else 0.0
            for key in self._shelves[shelf]:
                held = self._held[key]
                yield base + ((held.used - oldest) / span if span > 0 else 0.0), held.tick, key

        order = heapq.merge(*(scored(shelf) for shelf in self._shelves))
        return enough(((key, self._held[key].nbytes) for _, _, key in order), nbytes, keep)

    def _put(self, key: str, nbytes: int, efficiency: float, after: str, now: float) -> None:
        self._ticks += 1
        shelf = shelf_of(self._chains.lift(key, after, efficiency))
        self._held[key] = _Held(nbytes, efficiency, after, shelf, now, self._ticks)
        self._shelves.setdefault(shelf, OrderedDict())[key] = None

    def _take_down(self, key: str) -> _Held | None:
        held = self._held.pop(key, None)
        if held is not None:
            keys = self._shelves[held.shelf]
            del keys[key]
            if not keys:
                del self._shelves[held.shelf]
        return held


POLICIES.add("marconi")(MarconiPolicy)
