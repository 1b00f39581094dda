"""The greedy dual policies: a clock that ages, plus frequency times cost per byte."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.chains import Chains
from blendkv.market.eviction import AdmitsAll
from blendkv.market.ranking import Ranking


def density(item: Item) -> float:
    """Seconds that a hit saves per byte; nothing where loading takes longer than computing."""
    return max(0.0, item.saved) / max(1, item.nbytes)


class _Held:
    """What a greedy dual policy knows of a held block: its cost per byte, its uses, and the one before it."""

    __slots__ = ("after", "cost", "uses")

    def __init__(self) -> None:
        self.after = ""
        self.cost = 0.0
        self.uses = 0


class GdsfPolicy(AdmitsAll):
    """GreedyDual-Size with frequency (Cherkasova, HP Labs 1998): H = L + frequency x cost / size.

    Cost is `Item.saved`, frequency the uses since the block came (being added is the first), and L the priority of
    what was evicted last, by which all that is used later is ahead of what is not. Of equal priorities, what was used
    longest ago goes first.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    """

    def __init__(self, capacity: int) -> None:
        self._clock = 0.0
        self._held: dict[str, _Held] = {}
        self._ranking = Ranking()
        self._named: set[str] = set()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """Count the use that brings ``key``, at its new size and cost."""
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held()
        held.after = item.after
        held.cost = self._cost(key, item)
        self._used(key, held, item.nbytes)

    def touched(self, key: str, use: Use, now: float) -> None:
        """Count a use."""
        held = self._held.get(key)
        if held is not None:
            self._used(key, held, self._ranking.nbytes(key))

    def removed(self, key: str, now: float) -> None:
        """Forget ``key``; if it was evicted, its priority is the clock from now on."""
        if key not in self._held:
            return
        if key in self._named:
            self._named.discard(key)
            self._clock = max(self._clock, self._ranking.rank(key))
        del self._held[key]
        self._ranking.drop(key)

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The keys outside ``keep`` of the lowest priority until ``nbytes`` bytes are freed."""
        chosen = self._ranking.victims(nbytes, keep)
        self._named = set(chosen)
        return chosen

    def _used(self, key: str, held: _Held, nbytes: int) -> None:
        held.uses += 1
        self._ranking.set(key, nbytes, self._clock + held.uses * held.cost)

    def _cost(self, key: str, item: Item) -> float:
        """Seconds per byte of a block that comes."""
        return density(item)


class PgdsfPolicy(GdsfPolicy):
    """Prefix-aware GDSF (RAGCache, arXiv 2404.12457): clock + frequency x average cost per uncached token.

    The paper averages, over the requests that found a document not cached, the seconds of computing it per token that
    had to be computed. Here that is the mean of saved / bytes over the times that the block was made, each behind what
    stood before it then; bytes stand for tokens, as every token's KV has the same. The means of blocks that have left
    are kept, as many as there are blocks held and a thousand more at most. The paper evicts leaves of its tree only;
    here a block's priority is at least that of the held blocks that come after it in the prefix, so that the last one
    goes first.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._chains = Chains()
        self._made: dict[str, tuple[int, float]] = {}
        self._left: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def removed(self, key: str, now: float) -> None:
        """As GDSF; what making ``key`` took is remembered."""
        super().removed(key, now)
        made = self._made.pop(key, None)
        if made is None:
            return
        self._chains.leave(key)
        self._left[key] = made
        while len(self._left) > len(self._made) + 1000:
            self._left.popitem(last=False)

    def _used(self, key: str, held: _Held, nbytes: int) -> None:
        held.uses += 1
        rank = self._chains.lift(key, held.after, self._clock + held.uses * held.cost)
        self._ranking.set(key, nbytes, rank)

    def _cost(self, key: str, item: Item) -> float:
        """The mean over all times that the block was made, this one included."""
        times, total = self._made.get(key) or self._left.pop(key, (0, 0.0))
        self._made[key] = (times + 1, total + density(item))
        return (total + density(item)) / (times + 1)


POLICIES.add("gdsf")(GdsfPolicy)
POLICIES.add("pgdsf")(PgdsfPolicy)
