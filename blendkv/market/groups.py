"""Groups of blocks that are expected to behave alike, and what is learned of each."""

from __future__ import annotations

from math import log2

import numpy as np

from blendkv.market.classes import Classes
from blendkv.market.sessions import State
from blendkv.market.survival import EDGES, Floats, LifeTable, Prior, bin_of, holding_rates, steady_hazards

TURNS = (1, 2, 3, 5, 9, 17)
"""Turns of a session at which a new group of its private blocks begins."""
FEW = 4
"""Uses from which on a shared block's own rate is believed; blocks with fewer make groups of their own."""
SHARED_WEIGHT = 20.0
"""How many blocks' worth of evidence it is that a shared block goes on being used at its own rate."""
_HALF_OCTAVES = 64
_FASTEST = 1 / 16
"""Seconds between uses of the fastest group of shared blocks; each next one is half an octave slower."""
_RETURNS = 0.95
"""Prior probability that a session with a tool call in flight comes back in time."""
_ENDED = Prior(0.001, 600.0, 2.0)


class Group:
    """Life table and rates of one group; ``rates[b]`` is in uses per second of holding a block of age bin b."""

    __slots__ = ("horizons", "name", "prior", "rates", "table", "weight")

    def __init__(self, name: tuple[str, str, int], prior: Floats, weight: float) -> None:
        self.name = name
        self.prior = prior
        self.weight = weight
        self.table = LifeTable()
        self.rates: list[float] = []
        self.horizons: list[float] = []

    def hazards(self) -> Floats:
        """Probability of a use in each age bin, of blocks that came to it: counts and prior together."""
        entered, used = np.array(self.table.entered), np.array(self.table.used)
        return np.minimum((used + self.weight * self.prior) / (np.maximum(entered, used) + self.weight), 0.999)

    def reuse(self, place: int, horizon: float) -> float:
        """Probability that a block of age bin ``place`` is used within ``horizon`` seconds."""
        last = bin_of(EDGES[place] + horizon * (1 - 1e-9))
        return float(1.0 - np.prod(1.0 - self.hazards()[place : last + 1]))


class Groups:
    """All groups, by (workload class, kind, number)."""

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._groups: dict[tuple[str, str, int], Group] = {}

    def all(self) -> list[Group]:
        """Every group that has had a block."""
        return list(self._groups.values())

    def private(self, workload: str, turns: int) -> Group:
        """Blocks of one session that has had so many turns."""
        known = self._classes.get(workload)
        name = (known.name, "private", sum(turns >= first for first in TURNS))
        return self._groups.get(name) or self._make(name, known.private.hazards(), known.weight)

    def shared(self, workload: str, gap: float, uses: int) -> Group:
        """Blocks of several sessions that are used every ``gap`` seconds in the mean; few uses say little of that."""
        place = min(_HALF_OCTAVES, max(0, round(2 * log2(gap / _FASTEST)))) if gap > _FASTEST else 0
        name = (self._classes.get(workload).name, "shared" if uses >= FEW else "new", place)
        return self._groups.get(name) or self._make(name, steady_hazards(_FASTEST * 2 ** (place / 2)), SHARED_WEIGHT)

    def hinted(self, workload: str, state: State | float) -> Group:
        """Blocks of a session that is over, or that waits for a tool for so many seconds at most."""
        known = self._classes.get(workload)
        if isinstance(state, State):
            name, prior = (known.name, "ended", 0), _ENDED
        else:
            octave = min(20, max(0, round(log2(max(state, 1.0)))))
            name, prior = (known.name, "tool", octave), Prior(_RETURNS, 2.0**octave / 4)
        return self._groups.get(name) or self._make(name, prior.hazards(), known.weight)

    def learn(self, fade: float) -> None:
        """Compute all rates anew; what was counted so far counts ``fade`` times as much from now on."""
        _fit(self.all())
        for group in self._groups.values():
            group.table.fade(fade)

    def _make(self, name: tuple[str, str, int], prior: Floats, weight: float) -> Group:
        group = self._groups[name] = Group(name, prior, weight)
        _fit([group])
        return group


def _fit(groups: list[Group]) -> None:
    if groups:
        rates, horizons = holding_rates(np.stack([group.hazards() for group in groups]))
        for group, rate, horizon in zip(groups, rates.tolist(), horizons.tolist(), strict=True):
            group.rates, group.horizons = rate, horizon
