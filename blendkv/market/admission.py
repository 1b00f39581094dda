"""Admission control: who waits, who goes next, and who is asked to come again.

Waits are kept in proportion instead of in order: the request with the largest (time waited / target of its class) goes
next (waiting-time priority, Dovrolis, Stiliadis and Ramanathan 1999). Under load a class with a target of 1 s waits a
tenth as long as one with 10 s, and since every ratio grows as long as its request waits, nobody starves. A tenant that
has had more than its share, and a request that would push out state worth more than itself, count their time slower; a
session that was let in a moment ago, whose KV is still in memory, counts it faster.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from blendkv.errors import InputError
from blendkv.market.base import UNKNOWN

TARGETS: Mapping[str, float] = {"agent": 1.0, "chat": 1.0, "rag": 8.0, "single": 16.0, UNKNOWN: 4.0}
"""Seconds that a request of a class may wait as easily as one of another class waits its own."""
_SHARE_HALF_LIFE = 60.0
LEAST = 0.01
_SLOWEST = 4.0
"""A tenant over its share, or a costly newcomer, counts its time this much slower at most."""
_WARM, _WARM_FOR = 2.0, 10.0
"""A session counts its time so much faster for so many seconds after it was let in."""


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
        Requests that may wait at once; 0 for no limit.

    Raises
    ------
    InputError
        If a value makes no sense.
    """

    targets: Mapping[str, float] = field(default_factory=lambda: dict(TARGETS))
    slots: int = 1
    patience: float = 0.0
    queue: int = 0

    def __post_init__(self) -> None:
        for name, target in self.targets.items():
            if not 0.0 < target < math.inf:
                raise InputError(f"target of class {name!r} is {target} seconds; it must be above 0")
        if UNKNOWN not in self.targets:
            raise InputError(f"targets name no {UNKNOWN!r}; give one for requests of no known class")
        if self.slots < 1:
            raise InputError(f"slots is {self.slots}; at least 1 is allowed")
        if not 0.0 <= self.patience < math.inf or self.queue < 0:
            raise InputError(f"patience {self.patience} s, queue {self.queue}; 0 or more is allowed")


class AdmissionQueue:
    """Requests that wait, by class and tenant. Pure bookkeeping: the caller has the clock and the lock."""

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self.settings = settings or AdmissionSettings()
        self._lines: OrderedDict[tuple[str, str], deque[Applicant]] = OrderedDict()
        self._work: dict[str, float] = {}  # seconds of work that wait, by class
        self._served: dict[str, float] = {}  # seconds of work done, by tenant, fading
        self._faded = 0.0
        self._warm: OrderedDict[str, float] = OrderedDict()  # when each session was let in last, by that
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Applicant]:
        for line in self._lines.values():
            yield from line

    def offer(self, applicant: Applicant) -> Refusal | None:
        """Let a request wait, or refuse it."""
        workload = self.known(applicant.workload)
        wait = self.expected_wait(workload)
        if self.settings.queue and self._size >= self.settings.queue:
            return Refusal("queue_full", _whole(wait))
        if self.settings.patience and wait > self.settings.patience:
            return Refusal("overloaded", _whole(wait - self.settings.patience))
        self._lines.setdefault((workload, applicant.tenant), deque()).append(applicant)
        self._work[workload] = self._work.get(workload, 0.0) + applicant.cost
        self._size += 1
        return None

    def expected_wait(self, workload: str) -> float:
        """Seconds that a request of the class that comes now will wait for what waits already.

        By the conservation law: the mean wait, weighted by work, does not depend on the order; targets divide it.
        """
        total = sum(self._work.values())
        if total <= 0.0:
            return 0.0
        targets = self.settings.targets
        mean = sum(work * targets[name] for name, work in self._work.items()) / total
        return total / self.settings.slots * targets[self.known(workload)] / mean

    def next(self, now: float) -> Applicant | None:
        """Take the request that goes next; None if nobody waits."""
        best = self._best(now)
        if best is None:
            return None
        (workload, tenant), applicant = best
        line = self._lines[workload, tenant]
        line.remove(applicant)
        if not line:
            del self._lines[workload, tenant]
        self._gone(workload, applicant)
        self._note(applicant.session, now)
        self._fade(now)
        self._served[tenant] = self._served.get(tenant, 0.0) + applicant.cost
        return applicant

    def leave(self, id: str) -> bool:
        """A request does not wait any longer, its client has gone; return whether it did."""
        for (workload, tenant), line in self._lines.items():
            for applicant in line:
                if applicant.id == id:
                    line.remove(applicant)
                    if not line:
                        del self._lines[workload, tenant]
                    self._gone(workload, applicant)
                    return True
        return False

    def why(self, applicant: Applicant, now: float) -> str:
        """What makes a request that waits wait: ``pressure``, ``share``, ``class``, or only ``capacity``."""
        if self._pressure(applicant) > 1.0:
            return "pressure"
        if self._over_share(applicant.tenant, now) > 1.0:
            return "share"
        mine = self.settings.targets[self.known(applicant.workload)]
        if any(self.settings.targets[workload] < mine for workload, _ in self._lines):
            return "class"
        return "capacity"

    def known(self, workload: str) -> str:
        """The class as which a request of that tag is treated."""
        return workload if workload in self.settings.targets else UNKNOWN

    def _best(self, now: float) -> tuple[tuple[str, str], Applicant] | None:
        best, urgency = None, -1.0
        for line, waiting in self._lines.items():
            slow = self.settings.targets[line[0]] * self._over_share(line[1], now)
            for applicant in waiting:
                waited = max(0.0, now - applicant.arrived) + 1e-3  # all who came just now differ by their targets
                found = waited * self._warmth(applicant, now) / (slow * self._pressure(applicant))
                if found > urgency:
                    best, urgency = (line, applicant), found
        return best

    def _warmth(self, applicant: Applicant, now: float) -> float:
        """How much faster it counts its time because its session was let in a moment ago: its KV is still there."""
        return _WARM if applicant.session and now - self._warm.get(applicant.session, -math.inf) < _WARM_FOR else 1.0

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

    def _over_share(self, tenant: str, now: float) -> float:
        """How many times its fair share of the last minutes a tenant has had, 1 at least."""
        self._fade(now)
        rivals = {name for _, name in self._lines} | {tenant}
        if len(rivals) == 1:
            return 1.0
        total = sum(self._served.get(name, 0.0) for name in rivals)
        if total <= 0.0:
            return 1.0
        return min(_SLOWEST, max(1.0, self._served.get(tenant, 0.0) / total * len(rivals)))

    def _fade(self, now: float) -> None:
        if now > self._faded:
            factor = 0.5 ** ((now - self._faded) / _SHARE_HALF_LIFE)
            self._served = {name: kept for name, s in self._served.items() if (kept := s * factor) > 1e-6}
            self._faded = now

    def _gone(self, workload: str, applicant: Applicant) -> None:
        self._size -= 1
        left = self._work[workload] - applicant.cost
        if left > 1e-9:
            self._work[workload] = left
        else:
            del self._work[workload]


def _whole(seconds: float) -> int:
    """For ``Retry-After``: whole seconds, one at least."""
    return max(1, math.ceil(seconds))
