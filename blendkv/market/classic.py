"""The reflexes: first in first out, least recently used, least frequently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.eviction import AdmitsAll, enough
from blendkv.market.ranking import Ranking


class FifoPolicy(AdmitsAll):
    """What came first goes first, used or not; a block that is added again keeps its place.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    """

    def __init__(self, capacity: int) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """Put ``key`` at the young end."""
        self._sizes[key] = item.nbytes

    def touched(self, key: str, use: Use, now: float) -> None:
        """Nothing changes."""

    def removed(self, key: str, now: float) -> None:
        """Forget ``key``."""
        self._sizes.pop(key, None)

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The oldest keys outside ``keep`` until ``nbytes`` bytes are freed."""
        return enough(self._sizes.items(), nbytes, keep)


class LruPolicy(FifoPolicy):
    """What was used longest ago goes first; being added is a use.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    """

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """Put ``key`` at the young end, one that was there too."""
        self._sizes[key] = item.nbytes
        self._sizes.move_to_end(key)

    def touched(self, key: str, use: Use, now: float) -> None:
        """Move ``key`` to the young end."""
        if key in self._sizes:
            self._sizes.move_to_end(key)


class LfuPolicy(AdmitsAll):
    """What was used least often since it came goes first; of equal counts, what was used longest ago.

    Being added is a use. Counts end with the block's stay (in-cache LFU): one that comes back starts at 1.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    """

    def __init__(self, capacity: int) -> None:
        self._counts = Ranking()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """Count the use that brings ``key``."""
        counts = self._counts
        counts.set(key, item.nbytes, counts.rank(key) + 1 if key in counts else 1)

    def touched(self, key: str, use: Use, now: float) -> None:
        """Count a use."""
        counts = self._counts
        if key in counts:
            counts.set(key, counts.nbytes(key), counts.rank(key) + 1)

    def removed(self, key: str, now: float) -> None:
        """Forget ``key`` and its count."""
        if key in self._counts:
            self._counts.drop(key)

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The keys outside ``keep`` of the lowest counts until ``nbytes`` bytes are freed."""
        return self._counts.victims(nbytes, keep)


POLICIES.add("fifo")(FifoPolicy)
POLICIES.add("lru")(LruPolicy)
POLICIES.add("lfu")(LfuPolicy)
