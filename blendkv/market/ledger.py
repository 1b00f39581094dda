"""Who uses what: the history of every block, held or not, and of its like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import log2

from blendkv.market.base import Item, Use
from blendkv.market.classes import Classes
from blendkv.market.groups import FEW, Group, Groups
from blendkv.market.lanes import STEPS, Lane, Lanes
from blendkv.market.sessions import Sessions
from blendkv.market.whatif import WhatIf

_MOST_LIFTS = 1 << 12
_GAP_WEIGHT = 0.2
"""Weight of the last gap between two uses in a block's mean gap, once it was used often."""
_WORTHLESS = -400
_PRUNE = 256


class Entry:
    """What the ledger knows of one block.

    Attributes
    ----------
    worth
        Seconds that a hit saves per byte, of this block or of those that are of no use without it.
    since
        When it was used last, or its session gave a hint; ages count from here.
    gap
        Mean seconds between its uses.
    owner, shared
        The session that used it first, and whether others did too.
    mark
        Where it left the tier; see `blendkv.market.whatif`.
    """

    __slots__ = (
        "after", "bin", "gap", "held", "key", "lane", "mark", "nbytes", "owner", "saved", "shared", "since", "uses",
        "workload", "worth",
    )  # fmt: skip

    def __init__(self, key: str, owner: str, now: float) -> None:
        self.key = key
        self.nbytes = 1
        self.saved = 0.0
        self.after = ""
        self.held = False
        self.since = now
        self.uses = 0
        self.gap = 0.0
        self.owner = owner
        self.shared = False
        self.workload = ""
        self.lane: Lane | None = None
        self.bin = 0
        self.worth = 0.0
        self.mark = 0

    @property
    def step(self) -> int:
        """Its class of worth."""
        return max(_WORTHLESS, round(STEPS * log2(self.worth))) if self.worth > 0 else _WORTHLESS

    @property
    def value(self) -> float:
        """Seconds that it is expected to save per second of holding it."""
        return 0.0 if self.lane is None else self.lane.group.rates[self.bin] * self.worth * self.nbytes


class Ledger:
    """Histories of blocks: O(1) steps per event, those of growing old included, and the log of the number of lanes.

    Parameters
    ----------
    classes
        Workload classes with their priors.
    ghosts
        Blocks that are not held and are still watched, at most; the first to have left is forgotten first.
    refit
        Uses after which prices are learned anew.
    fade
        Share of earlier evidence that is kept then.
    """

    def __init__(self, classes: Classes, ghosts: int, refit: int, fade: float) -> None:
        self.entries: dict[str, Entry] = {}
        self.groups = Groups(classes)
        self.sessions = Sessions()
        self.what_if = WhatIf()
        self.now = 0.0
        self._lanes = Lanes()
        self._followed: dict[str, tuple[float, Group]] = {}  # when the next block was told of, its group
        self._lifts: dict[str, float] = {}  # by block, the largest worth among those that need it
        self._ghosts: OrderedDict[str, Entry] = OrderedDict()
        self._most_ghosts = ghosts
        self._refit = refit
        self._fade = fade
        self._uses = 0

    def advance(self, now: float) -> None:
        """Let time pass; while a clock goes back it stands still."""
        if now > self.now:
            self.now = now
            self._lanes.advance(now)

    def used(self, key: str, item: Item | None, use: Use, held: bool) -> Entry:
        """Note a use of a block, the first perhaps; ``item`` where its size or value is news.

        ``held`` says whether the tier holds it from now on.
        """
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, use.session, self.now)
        else:
            self._lanes.leave(entry, used=True)
            saved = entry.worth * entry.nbytes
            if entry.held:
                self.what_if.hit(saved)
            else:
                self.what_if.returned(entry.mark, saved)
            entry.gap = self._gap(entry)
            entry.shared = entry.shared or self._by_others(entry, use)
        if item is not None:
            entry.nbytes, entry.saved, entry.after = max(1, item.nbytes), max(0.0, item.saved), item.after
        entry.uses += 1
        entry.since = self.now
        entry.workload = use.workload
        self._lift(entry)
        self.sessions.used(key, use.session, self.now)
        self._hold(entry, held)
        if not held:  # it was refused: from here on it is missed like one that has left
            entry.mark = self.what_if.left
        self._enter(entry)
        self._count()
        return entry

    def newcomer(self, key: str, use: Use) -> Group:
        """The group in which a block would be if it were used now; nothing is noted."""
        entry = self.entries.get(key)
        if entry is not None and (entry.shared or self._by_others(entry, use)):
            return self.groups.shared(use.workload, self._gap(entry), entry.uses + 1)
        said = self.sessions.said(use.session)
        if said is not None:  # it will say so again
            return self.groups.hinted(use.workload, said)
        if entry is not None and not use.session:
            return self.groups.private(use.workload, entry.uses + 1)
        return self.groups.private(use.workload, self.sessions.turns(use.session, self.now))

    def drop(self, entry: Entry) -> None:
        """A block is not held any more, and watched on as a ghost."""
        if entry.held:
            self._lanes.shift(entry, None)
            self._hold(entry, False)
            entry.mark = self.what_if.leaves(entry.nbytes)

    def hinted(self, session: str) -> None:
        """The state of a session has changed: what it alone holds is priced by it from now on."""
        for key in self.sessions.keys(session):
            entry = self.entries.get(key)
            if entry is None:
                self.sessions.forget(session, key)
            elif not entry.shared and entry.owner == session:
                self._lanes.leave(entry, used=False)
                entry.since = self.now
                self._enter(entry)

    def cheapest(self) -> Iterator[tuple[Entry, float]]:
        """Held blocks with their prices, the cheapest first."""
        return self._lanes.cheapest()

    def dearest(self, count: int) -> list[tuple[float, list[Entry]]]:
        """See `Lanes.dearest`."""
        return self._lanes.dearest(count)

    def _by_others(self, entry: Entry, use: Use) -> bool:
        """Whether a use is not by the session that made the block; nobody's uses are told apart by their number."""
        if use.session or entry.owner:
            return use.session != entry.owner
        return entry.uses + 1 >= FEW

    def _gap(self, entry: Entry) -> float:
        """Its mean gap with the one that would end now."""
        return entry.gap + (self.now - entry.since - entry.gap) * max(_GAP_WEIGHT, 1.0 / max(1, entry.uses))

    def _lift(self, entry: Entry) -> None:
        # Blocks are told of from the end of a prompt to its begin: what needs this one has been told of already.
        entry.worth = max(entry.saved / entry.nbytes, self._lifts.pop(entry.key, 0.0))
        if entry.after:
            if len(self._lifts) >= _MOST_LIFTS:  # of prompts whose begin was never told of
                self._lifts.clear()
            self._lifts[entry.after] = max(entry.worth, self._lifts.get(entry.after, 0.0))

    def _hold(self, entry: Entry, held: bool) -> None:
        entry.held = held
        if held:
            self._ghosts.pop(entry.key, None)
            return
        self._ghosts[entry.key] = entry
        while len(self._ghosts) > self._most_ghosts:
            key, dropped = self._ghosts.popitem(last=False)
            self._lanes.leave(dropped, used=False)
            self.sessions.forget(dropped.owner, key)
            del self.entries[key]

    def _enter(self, entry: Entry) -> None:
        group = self._group(entry)
        when, behind = self._followed.pop(entry.key, (-1.0, group))
        if when == self.now and behind.rates[0] > group.rates[0]:
            group = behind  # it is needed whenever that one is
        if entry.after:
            if len(self._followed) >= _MOST_LIFTS:
                self._followed.clear()
            self._followed[entry.after] = self.now, group
        self._lanes.enter(entry, group, entry.step if entry.held else None, self.now)

    def _group(self, entry: Entry) -> Group:
        if entry.shared:
            return self.groups.shared(entry.workload, entry.gap, entry.uses)
        state = self.sessions.state(entry.owner)
        if state is not None:
            return self.groups.hinted(entry.workload, state)
        if not entry.owner:
            return self.groups.private(entry.workload, entry.uses)
        return self.groups.private(entry.workload, self.sessions.turns(entry.owner, self.now))

    def _count(self) -> None:
        self._uses += 1
        if self._uses % self._refit == 0:
            self.groups.learn(self._fade)
            self._lanes.reprice()
        elif self._uses % _PRUNE == 0:
            self._lanes.prune()
