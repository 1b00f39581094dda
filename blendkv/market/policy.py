"""The market: what has the lowest price leaves first, and nothing comes in that is worth less than what would leave."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import islice
from typing import NamedTuple

from blendkv.market.appraisal import Lot
from blendkv.market.base import POLICIES, UNKNOWN, Item, Use
from blendkv.market.classes import Classes
from blendkv.market.hints import Hint
from blendkv.market.ledger import Entry, Ledger
from blendkv.market.sessions import State
from blendkv.market.survival import bin_of

FAVOUR = 0.5
"""A newcomer is let in if it is worth this share of what leaves: those after it in its prefix depend on it."""


class Price(NamedTuple):
    """Why a block has its price.

    Attributes
    ----------
    key, nbytes
        Of the block.
    saved
        Seconds that a hit saves.
    workload, kind
        Class of its last use; ``private`` to a session, ``tool`` or ``ended`` by a session's hint, ``new`` or
        ``shared`` among several.
    age, uses
        Seconds since its last use or hint; uses so far.
    horizon, reuse
        Seconds for which it is worth holding, and the probability that it is used in them.
    price
        Seconds saved per byte and second of holding it.
    """

    key: str
    nbytes: int
    saved: float
    workload: str
    kind: str
    age: float
    uses: int
    horizon: float
    reuse: float
    price: float


class Standing(NamedTuple):
    """A held block: its key, its price in seconds saved per byte and second, and the class of its last use."""

    key: str
    price: float
    workload: str


class MarketPolicy:
    """Ranks blocks by price: seconds saved per byte and second of holding.

    price = P(used within T) / E[seconds held] x (recompute - load seconds) / bytes, with the horizon T that makes it
    largest (`blendkv.market.survival.holding_rates`), from what was learned of blocks of the same workload class that
    were used as long ago, as often, by as many sessions. Blocks of one price leave in the order of their last use.

    Parameters
    ----------
    capacity
        Bytes of the tier; bounds the ghosts.
    classes
        Workload classes beside the built-in ones.
    ghosts
        Blocks that have left and are still watched, at most.
    refit
        Uses after which prices are learned anew.
    fade
        Share of earlier evidence that is kept then.
    """

    def __init__(
        self,
        capacity: int,
        classes: Classes | None = None,
        *,
        ghosts: int = 1 << 17,
        refit: int = 2000,
        fade: float = 0.9,
    ) -> None:
        self.capacity = capacity
        self._ledger = Ledger(classes or Classes(), ghosts, refit, fade)

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` is held from now on."""
        self._ledger.advance(now)
        self._ledger.used(key, item, use, held=True)

    def touched(self, key: str, use: Use, now: float) -> None:
        """``key`` was used."""
        entry = self._ledger.entries.get(key)
        if entry is not None and entry.held:
            self._ledger.advance(now)
            self._ledger.used(key, None, use, held=True)

    def removed(self, key: str, now: float) -> None:
        """``key`` is not held any more; it is watched on."""
        entry = self._ledger.entries.get(key)
        if entry is not None:
            self._ledger.advance(now)
            self._ledger.drop(entry)

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """The cheapest keys outside ``keep`` until ``nbytes`` bytes are freed."""
        self._ledger.advance(now)
        chosen: list[str] = []
        freed = 0
        for entry, _ in self._ledger.cheapest():
            if freed >= nbytes:
                break
            if entry.key not in keep:
                chosen.append(entry.key)
                freed += entry.nbytes
        return chosen

    def admits(self, key: str, item: Item, use: Use, leaving: Sequence[str], now: float) -> bool:
        """Whether the newcomer is worth more than all that would leave; if not, its use is noted.

        What is not known, because it came to a tier behind this one before this process, counts as worth nothing.
        """
        if not leaving:
            return True
        self._ledger.advance(now)
        worth = self._ledger.newcomer(key, use).rates[0] * item.saved
        known = (self._ledger.entries.get(gone) for gone in leaving)
        if worth > FAVOUR * sum(entry.value for entry in known if entry is not None):
            return True
        self._ledger.used(key, item, use, held=False)
        return False

    def hint(self, session: str, what: Hint, ttl: float, now: float) -> None:
        """A session waits ``ttl`` seconds at most for a tool, goes on, or is over: its blocks are priced by that."""
        self._ledger.advance(now)
        state = {"tool_started": ttl, "tool_finished": None, "session_ended": State.ENDED}[what]
        if self._ledger.sessions.say(session, state) and state is not None:  # who goes on is about to use them
            self._ledger.hinted(session)

    def price(self, key: str) -> float | None:
        """Seconds saved per byte and second that ``key`` is held; None if it is not held."""
        entry = self._ledger.entries.get(key)
        return None if entry is None or not entry.held else entry.value / entry.nbytes

    def appraise(self, lots: Sequence[Lot], now: float) -> list[float]:
        """Prices in seconds saved per byte and second of holding, of blocks that are held or not.

        One that is not known, because another process used it or an earlier one, has that of an untagged block of its
        age.
        """
        self._ledger.advance(now)
        return [self._appraised(lot) for lot in lots]

    def _appraised(self, lot: Lot) -> float:
        entry = self._ledger.entries.get(lot.key)
        if entry is not None:
            return entry.value / entry.nbytes
        strange = self._ledger.groups.private(UNKNOWN, 1)
        return strange.rates[bin_of(max(0.0, lot.age))] * lot.item.saved / max(1, lot.item.nbytes)

    def seen(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` was used, and there is no room for it."""
        self._ledger.advance(now)
        entry = self._ledger.entries.get(key)
        self._ledger.used(key, item, use, held=entry is not None and entry.held)

    def prices(self, count: int, keep: Container[str], now: float) -> list[Price]:
        """The ``count`` blocks outside ``keep`` that would leave first, in that order."""
        self._ledger.advance(now)
        leaving = (entry for entry, _ in self._ledger.cheapest() if entry.key not in keep)
        return [_price(entry, self._ledger.now) for entry in islice(leaving, count)]

    def dearest(self, count: int, now: float) -> Callable[[], list[Standing]]:
        """The ``count`` dearest blocks, the dearest first.

        The list is made by the call that is returned, which may come when the policy is used by others again: for many
        blocks it takes its time.
        """
        self._ledger.advance(now)
        found = self._ledger.dearest(count)

        def standings() -> list[Standing]:
            rows = ((entry, price) for price, entries in found for entry in reversed(entries))
            return [Standing(entry.key, price, entry.workload) for entry, price in islice(rows, count)]

        return standings

    @property
    def saved(self) -> float:
        """Seconds that hits have saved so far."""
        return self._ledger.what_if.saved

    def more(self, nbytes: int) -> float:
        """Seconds that so many bytes more would have saved so far, from blocks that left and came back."""
        return self._ledger.what_if.more(nbytes)


def _price(entry: Entry, now: float) -> Price:
    lane = entry.lane
    assert lane is not None
    workload, kind, _ = lane.group.name
    horizon = lane.group.horizons[entry.bin]
    return Price(
        entry.key, entry.nbytes, entry.worth * entry.nbytes, workload, kind, now - entry.since, entry.uses, horizon,
        lane.group.reuse(entry.bin, horizon), entry.value / entry.nbytes,
    )  # fmt: skip


POLICIES.add("market")(MarketPolicy)
