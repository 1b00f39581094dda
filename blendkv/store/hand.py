"""Finds what is cheap on disk without looking at all of it: a hand that goes round in the order of last use.

As the hand of CLOCK does, it leaves behind what it spares: the next look begins behind it, so that old chunks of a high
price are not looked at again and again. The cheapest of what was spared are remembered and compete with what comes
next, so that a stretch of dear chunks does not lose one of them while cheap ones were passed a moment ago (as in the
eviction pool of Redis), and now and then it looks further ahead for them: what was put together stands together, so
that a stretch may be long. Of one price, the least recently used goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blendkv.store.index import Index, Placed

LEAST = 64
"""Chunks that are looked at for one eviction, at least, as far as there are so many."""
WIDER = 4
"""How many times the bytes that are needed are looked at, at least."""
_POOL = 64
_FAR_LOOKS = 32
"""Every so many looks, chunks at a quarter, half and three quarters of the order are looked at as well."""

Appraise = Callable[[Sequence[Placed]], list[float]]
"""Prices of chunks, in their order."""


class Hand:
    """Names victims among all chunks, or among one tenant's. Call it in a transaction of the index."""

    def __init__(self, index: Index, appraise: Appraise, tenant: str | None = None) -> None:
        self._index = index
        self._appraise = appraise
        self._tenant = tenant
        self._at = 0
        self._pool: list[str] = []
        self._looks = 0

    def copy(self) -> Hand:
        """Another hand at the same place, to look without moving this one."""
        other = Hand(self._index, self._appraise, self._tenant)
        other._at, other._pool, other._looks = self._at, self._pool, self._looks
        return other

    def victims(self, nbytes: int) -> list[str]:
        """Keys that are not pinned, the cheapest first, of ``nbytes`` bytes together or all that there are."""
        if nbytes <= 0:
            return []
        window = self._window(nbytes)
        rows = *self._index.standing(self._pool, self._tenant), *self._far(), *window
        found = list({row.key: row for row in rows}.values())
        ranked = sorted(zip(self._appraise(found), found, strict=True))  # of one price, by their ticks
        order = [row for _, row in ranked]
        chosen, freed = 0, 0
        while freed < nbytes and chosen < len(order):
            freed += order[chosen].file_bytes
            chosen += 1
        self._pool = [row.key for row in order[chosen : chosen + _POOL]]
        if window:
            self._at = window[-1].tick
        return [row.key for row in order[:chosen]]

    def _far(self) -> list[Placed]:
        self._looks += 1
        if self._looks % _FAR_LOOKS != 1:
            return []
        first, last = self._index.span(self._tenant)
        places = (first + (last - first) * quarter // 4 for quarter in (1, 2, 3))
        return [row for place in places for row in self._index.window(place, 0, LEAST, self._tenant)]

    def _window(self, nbytes: int) -> list[Placed]:
        """The next chunks behind the hand, and from the begin again where they are too few; each once."""
        window = self._index.window(self._at, WIDER * nbytes, LEAST, self._tenant)
        size = sum(row.file_bytes for row in window)
        if self._at and (size < WIDER * nbytes or len(window) < LEAST):
            more = self._index.window(0, WIDER * nbytes - size, LEAST - len(window), self._tenant)
            window += [row for row in more if row.tick <= self._at]
        return window
