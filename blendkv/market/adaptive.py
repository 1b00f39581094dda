"""The policies that learn from ghosts, blocks that have left: ARC and LeCaR.

Both learn when a block that had left is asked for again, which the interface tells with `added`, after it has had room
made for the block. The papers do so before; so here the lesson counts from the next eviction on.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Container

from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.eviction import AdmitsAll, enough
from blendkv.market.ranking import Ranking


class _Queue(OrderedDict[str, int]):
    """Keys with bytes, the oldest first, and the bytes of all."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def put(self, key: str, nbytes: int) -> None:
        """Add a key that is not there, at the young end."""
        self[key] = nbytes
        self.total += nbytes

    def take(self, key: str) -> int:
        """Remove a key that is there; return its bytes."""
        nbytes = self.pop(key)
        self.total -= nbytes
        return nbytes

    def trim(self) -> None:
        """Remove the oldest key."""
        self.total -= self.popitem(last=False)[1]


class ArcPolicy(AdmitsAll):
    """The adaptive replacement cache (Megiddo and Modha, FAST 2003), in bytes.

    T1 holds blocks that were used once lately, T2 those used at least twice; B1 and B2 are the ghosts of each. T1 gives
    way while it holds more than its target of p bytes, else T2. A ghost of B1 that comes back raises p by its size
    times max(B2 / B1, 1), one of B2 lowers it by its size times max(B1 / B2, 1). T1 and B1 have at most the capacity's
    bytes together, all four at most twice as much. With blocks of one size this is the paper's rule but for the
    tie: that T1 gives way at exactly p if the newcomer is a ghost of B2, for the newcomer is not known then.

    Parameters
    ----------
    capacity
        Bytes of the tier.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0
        self._once, self._often = _Queue(), _Queue()
        self._once_ghosts, self._often_ghosts = _Queue(), _Queue()
        self._named: set[str] = set()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """A block that is new comes to T1, one that was held or a ghost to T2."""
        for held in (self._once, self._often):
            if key in held:
                held.take(key)
                self._often.put(key, item.nbytes)
                break
        else:
            self._learn(key, item.nbytes)
        self._bound()

    def touched(self, key: str, use: Use, now: float) -> None:
        """Move ``key`` to the young end of T2."""
        if key in self._often:
            self._often.move_to_end(key)
        elif key in self._once:
            self._often.put(key, self._once.take(key))

    def removed(self, key: str, now: float) -> None:
        """``key`` becomes a ghost if it was evicted, and is forgotten if it was deleted."""
        for held, ghosts in ((self._once, self._once_ghosts), (self._often, self._often_ghosts)):
            if key in held:
                nbytes = held.take(key)
                if key in self._named:
                    self._named.discard(key)
                    ghosts.put(key, nbytes)
                    self._bound()

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The oldest keys outside ``keep`` of T1 while that is above its target, else of T2."""
        chosen: list[str] = []
        once = (entry for entry in self._once.items() if entry[0] not in keep)
        often = (entry for entry in self._often.items() if entry[0] not in keep)
        first, second = next(once, None), next(often, None)
        left, freed = self._once.total, 0
        while freed < nbytes and (first or second):
            if first and (left > self._target or second is None):
                (key, size), first = first, next(once, None)
                left -= size
            else:
                assert second is not None
                (key, size), second = second, next(often, None)
            chosen.append(key)
            freed += size
        self._named = set(chosen)
        return chosen

    def _learn(self, key: str, nbytes: int) -> None:
        """Take in a block that is not held; a ghost moves the target."""
        once, often = self._once_ghosts, self._often_ghosts
        if key in once:
            self._target = min(self._capacity, self._target + nbytes * max(often.total / max(1, once.total), 1.0))
            once.take(key)
            self._often.put(key, nbytes)
        elif key in often:
            self._target = max(0.0, self._target - nbytes * max(once.total / max(1, often.total), 1.0))
            often.take(key)
            self._often.put(key, nbytes)
        else:
            self._once.put(key, nbytes)

    def _bound(self) -> None:
        """Forget the oldest ghosts that are too many."""
        once, often, capacity = self._once_ghosts, self._often_ghosts, self._capacity
        while once and self._once.total + once.total > capacity:
            once.trim()
        held = self._once.total + self._often.total
        while often and held + once.total + often.total > 2 * capacity:
            often.trim()


class _Gone:
    """A ghost of LeCaR's: its bytes, its uses, and the number of the use that it made room for."""

    __slots__ = ("left", "nbytes", "uses")

    def __init__(self, nbytes: int, uses: int, left: int) -> None:
        self.nbytes = nbytes
        self.uses = uses
        self.left = left


class LecarPolicy(AdmitsAll):
    """LRU and LFU as experts, weighed by regret (LeCaR: Vietri et al., HotStorage 2018).

    Each newcomer is made room for by one of them, drawn by their weights. What leaves is noted in the history of the
    expert that named it; if it is asked for again t uses later, the other expert's weight is multiplied by
    exp(0.45 r), with the regret r = 0.005^(t / N) and N blocks held, itself included, and its own count of uses goes
    on. A history has half as many bytes as the tier at most. Of equal counts LFU names what was used longest ago.

    Parameters
    ----------
    capacity
        Bytes of the tier.
    seed
        Of the draws.
    """

    rate = 0.45
    """Learning rate, the paper's."""
    discount = math.log(0.005)
    """Logarithm of what is left of the regret after as many uses as there are blocks, the paper's."""

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self._bytes = capacity // 2
        self._random = random.Random(seed)
        self._draw = self._random.random()
        self._lead = 0.0  # ln(weight of LRU / weight of LFU): products of many regrets would leave the floats
        self._uses = 0
        self._recent: OrderedDict[str, int] = OrderedDict()
        self._counts = Ranking()
        self._history: tuple[OrderedDict[str, _Gone], ...] = (OrderedDict(), OrderedDict())
        self._totals = [0, 0]
        self._named: set[str] = set()
        self._expert = 0

    @property
    def lru_weight(self) -> float:
        """Weight of LRU; that of LFU is what is missing to 1."""
        return 0.5 * (1.0 + math.tanh(0.5 * self._lead))

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """Count the use that brings ``key``; one that is in a history moves the weights."""
        self._uses += 1
        before = self._counts.rank(key) if key in self._counts else self._regret(key)
        self._counts.set(key, item.nbytes, before + 1)
        self._recent[key] = item.nbytes
        self._recent.move_to_end(key)

    def touched(self, key: str, use: Use, now: float) -> None:
        """Count a use."""
        if key in self._counts:
            self._uses += 1
            self._counts.set(key, self._counts.nbytes(key), self._counts.rank(key) + 1)
            self._recent.move_to_end(key)

    def removed(self, key: str, now: float) -> None:
        """``key`` comes to the history of who named it; one that was deleted is forgotten."""
        if key not in self._counts:
            return
        uses = int(self._counts.rank(key))
        nbytes = self._recent.pop(key)
        self._counts.drop(key)
        if key not in self._named:
            return
        self._named.discard(key)
        self._draw = self._random.random()
        history = self._history[self._expert]
        history[key] = _Gone(nbytes, uses, self._uses + 1)
        self._totals[self._expert] += nbytes
        while history and self._totals[self._expert] > self._bytes:
            self._totals[self._expert] -= history.popitem(last=False)[1].nbytes

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """What the expert drawn names, until ``nbytes`` bytes are freed."""
        self._expert = 0 if self._draw < self.lru_weight else 1
        order = self._counts.walk() if self._expert else self._recent.items()
        chosen = enough(order, nbytes, keep)
        self._named = set(chosen)
        return chosen

    def _regret(self, key: str) -> int:
        """Move the weights if the block has left and is asked for again; return its uses until then."""
        for expert, away in ((0, -1.0), (1, 1.0)):
            gone = self._history[expert].pop(key, None)
            if gone is not None:
                self._totals[expert] -= gone.nbytes
                waited = (self._uses - gone.left) / (len(self._counts) + 1)
                self._lead += away * self.rate * math.exp(self.discount * waited)
                return gone.uses
        return 0


POLICIES.add("arc")(ArcPolicy)
POLICIES.add("lecar")(LecarPolicy)
