"""Waiting: requests arrive, prefill servers work on them, and a gatekeeper decides whose turn it is."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np

from blendkv.errors import BlendKVError, InputError
from blendkv.market.replay import Cache
from blendkv.market.trace import Request, Trace

Line = Mapping[int, "Waiting"]
"""Who waits, by number, in the order of arrival."""


class Waiting(NamedTuple):
    """A request that waits.

    Attributes
    ----------
    number
        Its place in the trace.
    request
        What it asks for.
    arrived
        Seconds at which it came first, whatever it was told then.
    """

    number: int
    request: Request
    arrived: float


class Gatekeeper(Protocol):
    """Admission control: may look into the cache (`Cache.peek`, its policy), and must not change it."""

    def admit(self, newcomer: Waiting, line: Line, now: float, cache: Cache) -> float | None:
        """None to let a request wait; else seconds after which it is to come again, above 0."""

    def order(self, line: Line, now: float, cache: Cache) -> int:
        """The number of the request that goes next, of a line that is not empty."""


class FirstCome:
    """All wait, and go in the order in which they came: no admission control."""

    def admit(self, newcomer: Waiting, line: Line, now: float, cache: Cache) -> float | None:
        """Let all wait."""
        return None

    def order(self, line: Line, now: float, cache: Cache) -> int:
        """The first."""
        return next(iter(line))


@dataclass(frozen=True)
class QueueSettings:
    """How the server is simulated.

    Attributes
    ----------
    closed
        Whether a session's next turn comes ``gap`` seconds after its last answer; else at the time in the trace.
    engines
        Servers; the first that is free takes who is next. They share the cache.
    load
        Requests come this much faster than in the trace; in a closed loop only sessions begin faster.
    decode
        Seconds per token of an answer. Decoding shares the engine with prefill and does not hold it up.
    starved
        Seconds of waiting from which on a request counts as starved.
    attempts
        Times that a request comes; refused that often, it is lost.
    """

    closed: bool = True
    engines: int = 1
    load: float = 1.0
    decode: float = 0.012
    starved: float = 120.0
    attempts: int = 8

    def __post_init__(self) -> None:
        if not 0.0 < self.load < math.inf or not 0.0 <= self.decode < math.inf:
            raise InputError(f"load {self.load}, decode {self.decode} s; a load above 0, and 0 or more seconds")
        if not self.starved > 0.0 or self.attempts < 1 or self.engines < 1:
            raise InputError(
                f"starved {self.starved} s, attempts {self.attempts}, engines {self.engines}; all must be above 0"
            )


@dataclass(frozen=True)
class Served:
    """One request that got its first token: seconds of its first arrival, of its begin and of its first token."""

    request: Request
    arrived: float
    began: float
    first: float

    @property
    def ttft(self) -> float:
        """Seconds from the first arrival to the first token: waiting, loading, computing."""
        return self.first - self.arrived

    @property
    def waited(self) -> float:
        """Seconds from the first arrival to the begin of the work."""
        return self.began - self.arrived


@dataclass
class Queued:
    """Result of a simulation; ``served`` in the order of service."""

    served: list[Served] = field(default_factory=list)
    refused: int = 0
    lost: int = 0
    starved_after: float = 120.0
    engines: int = 1
    start: float = 0.0
    until: float = 0.0
    """Seconds of the first arrival, and of the last one that waits for no answer before it: load is on until then."""

    def of(self, *workloads: str) -> Queued:
        """The part of some classes; refusals and losses are of all."""
        return replace(self, served=[s for s in self.served if s.request.use.workload in workloads])

    def ttft(self, percentile: float) -> float | None:
        """Seconds; None if nothing was served."""
        return float(np.percentile([s.ttft for s in self.served], percentile)) if self.served else None

    @property
    def longest_wait(self) -> float:
        """Seconds."""
        return max((s.waited for s in self.served), default=0.0)

    @property
    def starved(self) -> int:
        """Requests that waited longer than the bound, and those that were lost."""
        return sum(s.waited > self.starved_after for s in self.served) + self.lost

    @property
    def throughput(self) -> float:
        """First tokens per second as long as load is on."""
        return sum(s.first <= self.until for s in self.served) / max(self.until - self.start, 1e-9)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens of those per second: who serves long prompts first answers fewer requests, and no less."""
        return sum(s.request.tokens for s in self.served if s.first <= self.until) / max(self.until - self.start, 1e-9)

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last first token."""
        return max((s.first for s in self.served), default=self.start) - self.start

    @property
    def busy(self) -> float:
        """Share of the time in which the servers work, as long as load is on."""
        work = sum(max(0.0, min(s.first, self.until) - s.began) for s in self.served)
        return work / max(self.until - self.start, 1e-9) / self.engines


def waits(arrivals: Sequence[float], services: Sequence[float], engines: int = 1) -> list[float]:
    """Seconds that each request waits for the first free server, first come, first served."""
    found: list[float] = []
    free = [-math.inf] * engines
    for arrival, service in zip(arrivals, services, strict=True):
        begin = max(arrival, free[0])
        found.append(begin - arrival)
        heapq.heapreplace(free, begin + service)
    return found


def simulate(
    trace: Trace, cache: Cache, settings: QueueSettings | None = None, gatekeeper: Gatekeeper | None = None
) -> Queued:
    """Send a trace through a queue, a server and a cache.

    A server works on one request at a time, for as long as loading and computing take. What the cache holds when the
    work begins counts, and what the work makes is there at once, also for another server. A lost request's session goes
    on with its next turn in an open loop, and ends in a closed one.

    Raises
    ------
    InputError
        If the trace cannot be replayed.
    BlendKVError
        If the gatekeeper names a request that does not wait, or refuses without saying for how long.
    """
    return _Simulation(trace.check(), cache, settings or QueueSettings(), gatekeeper or FirstCome()).run()


class _Arrival(NamedTuple):
    at: float
    order: int
    waiting: Waiting
    attempt: int


class _Simulation:
    def __init__(self, trace: Trace, cache: Cache, settings: QueueSettings, gatekeeper: Gatekeeper) -> None:
        self.cache, self.settings, self.gatekeeper = cache, settings, gatekeeper
        self.result = Queued(starved_after=settings.starved, engines=settings.engines)
        self.line: dict[int, Waiting] = {}
        self._coming: list[_Arrival] = []
        self._answers: list[tuple[float, int, Request]] = []
        self._order = 0
        self._turns: dict[str, Iterator[tuple[int, Request]]] = {}
        self._begin(trace)

    def run(self) -> Queued:
        """Until nobody is left."""
        free = [-math.inf] * self.settings.engines
        now = -math.inf
        while self._coming or self.line:
            now = max(now, free[0], *(() if self.line else (self._coming[0].at,)))
            self._let_come(now)
            if self.line:
                heapq.heapreplace(free, self._work(now))
        self._end_answers(math.inf)
        return self.result

    def _begin(self, trace: Trace) -> None:
        turns: dict[str, list[tuple[int, Request]]] = {}
        for number, request in enumerate(trace.requests):
            if self.settings.closed and request.use.session:
                turns.setdefault(request.use.session, []).append((number, request))
            else:
                self._come(number, request, request.arrival / self.settings.load)
        for session, requests in turns.items():
            left = self._turns[session] = iter(requests)
            number, request = next(left)
            self._come(number, request, request.arrival / self.settings.load)
        self.result.start = self._coming[0].at
        self.result.until = max(arrival.at for arrival in self._coming)

    def _come(self, number: int, request: Request, at: float) -> None:
        self._push(_Arrival(at, 0, Waiting(number, request, at), 1))

    def _push(self, arrival: _Arrival) -> None:
        self._order += 1
        heapq.heappush(self._coming, arrival._replace(order=self._order))

    def _let_come(self, now: float) -> None:
        """All who arrive until ``now``, in order, each after the answers that end before."""
        while self._coming and self._coming[0].at <= now:
            at, _, newcomer, attempt = heapq.heappop(self._coming)
            self._end_answers(at)
            self.cache.arrives(newcomer.request, at)
            later = self.gatekeeper.admit(newcomer, self.line, at, self.cache)
            if later is None:
                self.line[newcomer.number] = newcomer
                continue
            if not 0.0 < later < math.inf:
                raise BlendKVError(f"{type(self.gatekeeper).__name__} refuses a request for {later} seconds")
            self.result.refused += 1
            if attempt < self.settings.attempts:
                self._push(_Arrival(at + later, 0, newcomer, attempt + 1))
            else:
                self.result.lost += 1
        self._end_answers(now)

    def _work(self, now: float) -> float:
        """Begin with one request; return when its server is free again."""
        number = self.gatekeeper.order(self.line, now, self.cache)
        chosen = self.line.pop(number, None)
        if chosen is None:
            raise BlendKVError(f"{type(self.gatekeeper).__name__} sends request {number}, which does not wait")
        request = chosen.request
        first = now + self.cache.serve(request, now).seconds
        self.result.served.append(Served(request, chosen.arrived, now, first))
        answered = first + request.output * self.settings.decode
        heapq.heappush(self._answers, (answered, number, request))
        following = next(self._turns.get(request.use.session, iter(())), None)
        if following is not None:
            self._come(*following, answered + following[1].gap)
        return first

    def _end_answers(self, until: float) -> None:
        while self._answers and self._answers[0][0] <= until:
            at, _, request = heapq.heappop(self._answers)
            self.cache.answered(request, at)
