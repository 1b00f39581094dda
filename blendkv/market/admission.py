"""Admission control: who waits, who goes next, and who is asked to come again.

Waits are kept in proportion instead of in order: the request with the largest (time waited / target of its class) goes
next (waiting-time priority, Dovrolis, Stiliadis and Ramanathan 1999). Under load a class with a target of 1 s waits a
tenth as long as one with 10 s. A request that would push out state worth more than itself counts its time slower; a
session that was let in a moment ago, whose KV is still in memory, counts it faster.

Proportions alone have no end: while sessions come back as soon as they are answered, whoever has a large target waits
as many times longer as that target is larger. So a request that has waited `AdmissionSettings.longest` seconds, and
`PATIENT` times as long as first come, first served would have made it wait, goes before all others of its tenant, in
the order of arrival: from then on it waits only for those that came before it. Until then its share grows faster and
faster, so that such requests do not come in herds, for which others would have to wait.

Tenants come first of all: whoever has had least of the work goes next (`blendkv.market.shares`), whatever its class.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from blendkv.errors import InputError
from blendkv.market.base import UNKNOWN
from blendkv.market.shares import FairShares

TARGETS: Mapping[str, float] = {"agent": 1.0, "chat": 1.0, "rag": 8.0, "single": 16.0, UNKNOWN: 4.0}
"""Seconds that a request of a class may wait as easily as one of another class waits its own."""
PATIENT = 2.0
LONGEST = 60.0
_SLOWEST = 4.0
"""A costly newcomer counts its time this much slower at most."""
_WARM_FOR = 10.0
"""A session counts its time faster for so many seconds after it was let in."""


class Applicant(NamedTuple):
    """A request at the door.

    Attributes
    ----------
    id
        Of the request.
    workload, tenant
        Its class, and whose it is.
    arrived
        Seconds of the clock.
    cost
        Seconds of work that it is expected to be.
    evicts
        Seconds of later work that it costs others, by what it pushes out of the cache.
    session
        What ties it to the turns before it; empty if nothing does.
    """

    id: str
    workload: str
    tenant: str
    arrived: float
    cost: float
    evicts: float = 0.0
    session: str = ""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not let in, and seconds after which to come again."""

    reason: str
    retry_after: int


@dataclass(frozen=True)
class AdmissionSettings:
    """Knobs of the door.

    Attributes
    ----------
    targets
        Seconds by workload class; a class that is not named counts as ``unknown``.
    slots
        Requests that the engine works on at once.
    patience
        A request is refused if its expected wait is longer than this many seconds; 0 never refuses.
    queue
        Requests of one tenant that may wait at once; 0 for no limit.
    longest
        Seconds that a request may have waited before it goes before others of its tenant, whatever their classes; later
        where first come, first served itself would be so slow. 0: proportions alone decide.
    warm
        How many times faster a session counts its time that was let in a moment ago; 1: as any other.

    Raises
    ------
    InputError
        If a value makes no sense.
    """

    targets: Mapping[str, float] = field(default_factory=lambda: dict(TARGETS))
    slots: int = 1
    patience: float = 0.0
    queue: int = 0
    longest: float = LONGEST
    warm: float = 2.0

    def __post_init__(self) -> None:
        for name, target in self.targets.items():
            if not 0.0 < target < math.inf:
                raise InputError(f"target of class {name!r} is {target} seconds; it must be above 0")
        if UNKNOWN not in self.targets:
            raise InputError(f"targets name no {UNKNOWN!r}; give one for requests of no known class")
        if self.slots < 1:
            raise InputError(f"slots is {self.slots}; at least 1 is allowed")
        if not 0.0 <= self.patience < math.inf or self.queue < 0 or not 0.0 <= self.longest < math.inf:
            raise InputError(
                f"patience {self.patience} s, queue {self.queue}, longest {self.longest} s; 0 or more is allowed"
            )
        if not 1.0 <= self.warm < math.inf:
            raise InputError(f"warm is {self.warm}; at least 1 is allowed")


class _Place(NamedTuple):
    """A request in its line: as which class it is treated, and when it goes before others."""

    applicant: Applicant
    workload: str
    due: float


class _Line:
    """Who waits of one tenant, in the order of arrival, and the work that this is by class."""

    def __init__(self) -> None:
        self.places: dict[str, _Place] = {}
        self.work: dict[str, float] = {}

    def add(self, place: _Place) -> None:
        self.places[place.applicant.id] = place
        self.work[place.workload] = self.work.get(place.workload, 0.0) + place.applicant.cost

    def take(self, id: str) -> Applicant:
        applicant, workload, _ = self.places.pop(id)
        left = self.work.pop(workload, 0.0) - applicant.cost
        if left > 1e-9:
            self.work[workload] = left
        return applicant


class AdmissionQueue:
    """Requests that wait, by tenant. Pure bookkeeping: the caller has the clock and the lock."""

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self.settings = settings or AdmissionSettings()
        self._lines: dict[str, _Line] = {}
        self._shares = FairShares()
        self._warm: OrderedDict[str, float] = OrderedDict()  # when each session was let in last, by that

    def __len__(self) -> int:
        return sum(len(line.places) for line in self._lines.values())

    def __iter__(self) -> Iterator[Applicant]:
        for line in self._lines.values():
            for place in line.places.values():
                yield place.applicant

    def offer(self, applicant: Applicant) -> Refusal | None:
        """Let a request wait, or refuse it."""
        settings, tenant = self.settings, applicant.tenant
        wait = self.expected_wait(applicant.workload, tenant)
        line = self._lines.get(tenant)
        if settings.queue and line is not None and len(line.places) >= settings.queue:
            return Refusal("queue_full", _whole(wait))
        if settings.patience and wait > settings.patience:
            return Refusal("overloaded", _whole(wait - settings.patience))
        due = applicant.arrived + self._bound(self._in_order(tenant))
        if line is None:
            line = self._lines[tenant] = _Line()
            self._shares.enters(tenant)
        line.add(_Place(applicant, self.known(applicant.workload), due))
        return None

    def expected_wait(self, workload: str, tenant: str = "") -> float:
        """Seconds that a request of the class and tenant that comes now will wait for what waits already.

        By the conservation law: the mean wait, weighted by work, does not depend on the order; targets divide it, up to
        the bound of the longest wait.
        """
        line, in_order = self._lines.get(tenant), self._in_order(tenant)
        if line is None or in_order <= 0.0:
            return 0.0
        targets = self.settings.targets
        mean = sum(work * targets[name] for name, work in line.work.items()) / sum(line.work.values())
        return min(in_order * targets[self.known(workload)] / mean, self._bound(in_order) + in_order)

    def next(self, now: float) -> Applicant | None:
        """Take the request that goes next; None if nobody waits."""
        if not self._lines:
            return None
        tenant = self._shares.first(self._lines)
        applicant = self._lines[tenant].take(self._best(self._lines[tenant], now))
        self._note(applicant.session, now)
        if not self._lines[tenant].places:
            del self._lines[tenant]
        self._shares.begins(tenant, applicant.cost, self._lines)
        return applicant

    def corrected(self, tenant: str, seconds: float) -> None:
        """A request took so many seconds more than its ``cost``, or less if negative: its tenant's share knows."""
        self._shares.corrected(tenant, seconds)

    def leave(self, id: str) -> bool:
        """A request does not wait any longer, its client has gone; return whether it did."""
        for tenant, line in self._lines.items():
            if id in line.places:
                line.take(id)
                if not line.places:
                    del self._lines[tenant]
                return True
        return False

    def why(self, applicant: Applicant, now: float) -> str:
        """What makes a request that waits wait: ``pressure``, ``share``, ``class``, or only ``capacity``."""
        if self._pressure(applicant) > 1.0:
            return "pressure"
        if self._shares.behind(applicant.tenant, self._lines):
            return "share"
        mine = self.settings.targets[self.known(applicant.workload)]
        waiting = {place.workload for place in self._lines[applicant.tenant].places.values()}
        if any(self.settings.targets[workload] < mine for workload in waiting):
            return "class"
        return "capacity"

    def known(self, workload: str) -> str:
        """The class as which a request of that tag is treated."""
        return workload if workload in self.settings.targets else UNKNOWN

    def _in_order(self, tenant: str) -> float:
        """Seconds that a request that comes now would wait first come, first served within its tenant."""
        line = self._lines.get(tenant)
        if line is None:
            return 0.0
        return sum(line.work.values()) * len(self._lines) / self.settings.slots

    def _bound(self, in_order: float) -> float:
        """Seconds after which a request goes before others of its tenant."""
        return max(self.settings.longest, PATIENT * in_order) if self.settings.longest else math.inf

    def _best(self, line: _Line, now: float) -> str:
        """Who goes next of a line: the first whose time has come, or else the most urgent one."""
        best, urgency = "", -1.0
        for id, (applicant, workload, due) in line.places.items():
            if due <= now:
                return id
            waited = max(0.0, now - applicant.arrived)
            left = 1.0 - waited / (due - applicant.arrived)  # what others are ahead by fades until its time has come
            slow = self.settings.targets[workload] * self._pressure(applicant) * left
            found = (waited + 1e-3) * self._warmth(applicant, now) / slow  # who came just now differ by their targets
            if found > urgency:
                best, urgency = id, found
        return best

    def _warmth(self, applicant: Applicant, now: float) -> float:
        """How much faster it counts its time because its session was let in a moment ago: its KV is still there."""
        let_in = self._warm.get(applicant.session, -math.inf) if applicant.session else -math.inf
        return self.settings.warm if now - let_in < _WARM_FOR else 1.0

    def _note(self, session: str, now: float) -> None:
        if session:
            self._warm[session] = now
            self._warm.move_to_end(session)
        while self._warm and now - next(iter(self._warm.values())) >= _WARM_FOR:
            self._warm.popitem(last=False)

    def _pressure(self, applicant: Applicant) -> float:
        if applicant.evicts <= applicant.cost:
            return 1.0
        return min(_SLOWEST, applicant.evicts / max(applicant.cost, 1e-6))


def _whole(seconds: float) -> int:
    """For ``Retry-After``: whole seconds, one at least."""
    return max(1, math.ceil(seconds))
