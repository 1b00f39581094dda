"""The offline bounds: what is used again furthest in the future leaves first."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence

from blendkv.market.base import Item, Use
from blendkv.market.chains import Chains
from blendkv.market.eviction import enough
from blendkv.market.greedy import density
from blendkv.market.ranking import Ranking
from blendkv.market.shelves import shelf_of, worth_of


class BeladyPolicy:
    """MIN (Belady, IBM Systems Journal 1966): the block that is used again last goes first.

    A newcomer that is not used again before at least one of those that would leave for it is not admitted. Uses at one
    time count as one: what is used now is used again when the clock has moved on.

    Parameters
    ----------
    uses
        All uses that there will be, as (seconds, key) on the clock of ``now``, in the order of time.
    """

    def __init__(self, uses: Iterable[tuple[float, str]]) -> None:
        self._uses: dict[str, list[float]] = {}
        for when, key in uses:
            self._uses.setdefault(key, []).append(when)
        self._soonest = Ranking()
        self._furthest: dict[int, Ranking] = {}
        self._held: dict[str, tuple[Item, int]] = {}

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` is held from now on."""
        self._advance(now)
        shelf = self._shelf(key, item)
        if key in self._held and self._held[key][1] != shelf:
            self._take_down(key)
        self._held[key] = (item, shelf)
        self._rank(key, now)

    def touched(self, key: str, use: Use, now: float) -> None:
        """Its next use is a later one from now on."""
        if key in self._held:
            self.added(key, self._held[key][0], use, now)

    def removed(self, key: str, now: float) -> None:
        """Forget ``key``."""
        if key in self._held:
            self._take_down(key)
            del self._held[key]

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The keys outside ``keep`` that are used again last, until ``nbytes`` bytes are freed."""
        self._advance(now)
        order = heapq.merge(*(self._scored(shelf, now) for shelf in self._furthest))
        return enough(((key, size) for _, _, key, size in order), nbytes, keep)

    def admits(self, key: str, item: Item, use: Use, leaving: Sequence[str], now: float) -> bool:
        """Whether the newcomer is used again before one of those that would leave."""
        if not leaving:
            return True
        self._advance(now)
        scores = [self._score(self._soonest.rank(gone), self._held[gone][1], now) for gone in leaving]
        return self._score(self._next(key, now), self._own_shelf(item), now) < max(scores)

    def _own_shelf(self, item: Item) -> int:
        """The shelf of a block on its own; here all blocks are in one order."""
        return 0

    def _shelf(self, key: str, item: Item) -> int:
        """The shelf of a block that is held."""
        return self._own_shelf(item)

    def _score(self, when: float, shelf: int, now: float) -> float:
        """The highest leaves first."""
        return when

    def _scored(self, shelf: int, now: float) -> Iterator[tuple[float, int, str, int]]:
        ranking = self._furthest[shelf]
        for place, (key, size) in enumerate(ranking.walk()):
            yield -self._score(-ranking.rank(key), shelf, now), place, key, size

    def _next(self, key: str, now: float) -> float:
        """When ``key`` is used next after ``now``; infinite if it is not."""
        times = self._uses.get(key, ())
        place = bisect_right(times, now)
        return times[place] if place < len(times) else math.inf

    def _rank(self, key: str, now: float) -> None:
        item, shelf = self._held[key]
        when = self._next(key, now)
        self._soonest.set(key, item.nbytes, when)
        self._furthest.setdefault(shelf, Ranking()).set(key, item.nbytes, -when)

    def _advance(self, now: float) -> None:
        """Rank those anew whose next use has passed, whether they were used or not."""
        soonest = self._soonest
        while (key := soonest.lowest()) is not None and soonest.rank(key) <= now:
            self._rank(key, now)

    def _take_down(self, key: str) -> None:
        shelf = self._held[key][1]
        self._soonest.drop(key)
        self._furthest[shelf].drop(key)
        if not self._furthest[shelf]:
            del self._furthest[shelf]


class BeladyCostPolicy(BeladyPolicy):
    """Belady for blocks of unlike size and cost: the largest (seconds until the next use) x bytes / saved goes first.

    Not a bound as MIN is one for blocks that are alike, which is hard to compute for others, but a strong reference.
    Saved / bytes is taken in steps of 2^(1/8), and is for a held block at least that of those after it in the prefix.
    What is not used again goes before all else.

    Parameters
    ----------
    uses
        As for `BeladyPolicy`.
    """

    def __init__(self, uses: Iterable[tuple[float, str]]) -> None:
        super().__init__(uses)
        self._chains = Chains()

    def removed(self, key: str, now: float) -> None:
        """Forget ``key``."""
        super().removed(key, now)
        self._chains.leave(key)

    def _own_shelf(self, item: Item) -> int:
        return shelf_of(density(item))

    def _shelf(self, key: str, item: Item) -> int:
        return shelf_of(self._chains.lift(key, item.after, density(item)))

    def _score(self, when: float, shelf: int, now: float) -> float:
        worth = worth_of(shelf)
        return (when - now) / worth if worth > 0 else math.inf
