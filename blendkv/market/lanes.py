"""Blocks by what sets their price (group, worth, age), so that growing old and finding the cheapest are cheap.

A lane holds the blocks of one group and one class of worth, by age bin, the oldest first in each. Growing old moves a
block from the front of one bin to the end of the next, some thirty times in a long life, and prices belong to bins.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from blendkv.market.groups import Group
from blendkv.market.survival import BINS, EDGES

if TYPE_CHECKING:
    from blendkv.market.ledger import Entry

STEPS = 4
"""Classes of worth per octave: prices within a fifth of each other count as one."""
_NEVER = float("inf")
_TICK = EDGES[1] / 2
"""Seconds between two looks at who has grown old."""


class Lane:
    """Blocks of one group and one class of worth, by age bin; ghosts have a lane of their own and no price."""

    __slots__ = ("bins", "due", "group", "listed", "worth")

    def __init__(self, group: Group, worth: float | None) -> None:
        self.group = group
        self.worth = worth
        self.bins: list[OrderedDict[str, Entry]] = [OrderedDict() for _ in range(BINS)]
        self.listed = [False] * BINS
        self.due = _NEVER

    def price(self, place: int) -> float:
        """Seconds saved per byte and second of holding a block of that age."""
        return 0.0 if self.worth is None else self.group.rates[place] * self.worth


class Lanes:
    """All lanes, and their bins in the order of their prices."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[Group, int | None], Lane] = {}
        self._due: list[tuple[float, int, Lane]] = []
        self._order: list[tuple[float, int, Lane, int]] = []
        self._made = 0
        self._looked = 0.0

    def enter(self, entry: Entry, group: Group, step: int | None, now: float) -> None:
        """A block of age 0; ``step`` is its class of worth, None for a ghost."""
        lane = self._lane(group, step)
        entry.lane, entry.bin = lane, 0
        group.table.entered[0] += 1.0
        self._put(lane, 0, entry)
        self._await(lane, now + EDGES[1])

    def shift(self, entry: Entry, step: int | None) -> None:
        """A block becomes a ghost, or is held again, at its age."""
        old = entry.lane
        assert old is not None
        old.bins[entry.bin].pop(entry.key, None)
        entry.lane = self._lane(old.group, step)
        self._put(entry.lane, entry.bin, entry)
        if entry.bin + 1 < BINS:
            self._await(entry.lane, entry.since + EDGES[entry.bin + 1])

    def leave(self, entry: Entry, used: bool) -> None:
        """A block starts anew: it was used, or something else has happened that ends its wait."""
        lane = entry.lane
        if lane is None:
            return
        lane.bins[entry.bin].pop(entry.key, None)
        if used:
            lane.group.table.used[entry.bin] += 1.0
        else:  # it was not watched to the end of this bin
            lane.group.table.entered[entry.bin] -= 1.0
        entry.lane = None

    def advance(self, now: float) -> None:
        """Let blocks grow old."""
        if now - self._looked < _TICK:
            return
        self._looked = now
        due = self._due
        while due and due[0][0] <= now:
            when, _, lane = heapq.heappop(due)
            if when == lane.due:  # else another one is due earlier, and has a place of its own
                lane.due = _NEVER
                self._await(lane, self._grow_old(lane, now))

    def reprice(self) -> None:
        """Prices have changed: order anew."""
        self._order = []
        for lane in self._lanes.values():
            if lane.worth is not None:
                for place, held in enumerate(lane.bins):
                    lane.listed[place] = bool(held)
                    if held:
                        self._order.append(self._listing(lane, place))
        self._order.sort()

    def prune(self) -> None:
        """Strike out bins that are empty."""
        kept = []
        for listing in self._order:
            _, _, lane, place = listing
            if lane.bins[place]:
                kept.append(listing)
            else:
                lane.listed[place] = False
        self._order = kept

    def cheapest(self) -> Iterator[tuple[Entry, float]]:
        """Held blocks with their prices, the cheapest first; of one price, the one used longest ago."""
        for price, _, lane, place in self._order:
            for entry in lane.bins[place].values():
                yield entry, price

    def dearest(self, count: int) -> list[tuple[float, list[Entry]]]:
        """``count`` held blocks, or a few more, by price: the dearest first; of one price, the one used last last."""
        found: list[tuple[float, list[Entry]]] = []
        for price, _, lane, place in reversed(self._order):
            if count <= 0:
                break
            found.append((price, list(lane.bins[place].values())))
            count -= len(found[-1][1])
        return found

    def _lane(self, group: Group, step: int | None) -> Lane:
        lane = self._lanes.get((group, step))
        if lane is None:
            lane = self._lanes[group, step] = Lane(group, None if step is None else 2.0 ** (step / STEPS))
        return lane

    def _put(self, lane: Lane, place: int, entry: Entry) -> None:
        lane.bins[place][entry.key] = entry
        if lane.worth is not None and not lane.listed[place]:
            lane.listed[place] = True
            insort(self._order, self._listing(lane, place))

    def _listing(self, lane: Lane, place: int) -> tuple[float, int, Lane, int]:
        self._made += 1  # so that lanes of one price are never compared
        return lane.price(place), self._made, lane, place

    def _await(self, lane: Lane, when: float) -> None:
        if when < lane.due:
            lane.due = when
            self._made += 1
            heapq.heappush(self._due, (when, self._made, lane))

    def _grow_old(self, lane: Lane, now: float) -> float:
        """Move blocks on, from the youngest bin to the oldest; return when the next one is due.

        Ghosts come to their lane at any age, so that one may wait for another that is a little younger.
        """
        due = _NEVER
        for place, held in enumerate(lane.bins):
            if not held or place == BINS - 1:
                continue
            end, moved = EDGES[place + 1], 0
            while held:
                key, entry = next(iter(held.items()))
                if entry.since + end > now:
                    due = min(due, entry.since + end)
                    break
                del held[key]
                entry.bin = place + 1
                self._put(lane, place + 1, entry)
                moved += 1
            lane.group.table.entered[place + 1] += moved
        return due
