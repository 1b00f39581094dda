"""Generated traces, by name and seed: same name, seed, length and rate, same trace."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from blendkv.errors import InputError
from blendkv.market.trace import Request, Trace
from blendkv.market.workloads import Agents, Chats, Corpora, Singles, Workload
from blendkv.registry import Registry

SHARES: Mapping[str, float] = {"agent": 0.40, "chat": 0.25, "rag": 0.25, "single": 0.10}
"""Of the requests of a mixed trace."""
LENGTH = 10_000
ENGINES = 16
"""Engines that share the tier: two nodes of eight GPUs."""
ENGINE_RATE = 3.4
"""Requests per second and engine: those of Mooncake's conversation trace (12,031 in 3,537 s)."""
RATE = ENGINES * ENGINE_RATE
SCAN_SHARE = 1 / 8
WARM_UP = 1200.0
"""Seconds of sessions before the first request of a trace, which begins in the midst of them."""
MISTAKES = {"agent": "rag", "rag": "chat", "chat": "single", "single": "agent"}
"""What each class is tagged as where all tags are wrong."""
_BURST = (4.0, 30.0)
_CALM = (0.25, 120.0)
"""Factor of the arrival rate, and mean seconds that it lasts; 1 in the long run."""


@dataclass(frozen=True)
class Recipe:
    """What a trace is made of.

    Attributes
    ----------
    shares
        Of the requests, by workload class.
    bursts
        Whether sessions begin in bursts.
    drift
        Chunks that leave the head of each corpus's ranking every minute.
    scan
        Whether a crawler asks for every chunk once, in the middle third of the trace.
    mislabelled
        Share of requests with wrong tags.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: dict(SHARES))
    bursts: bool = False
    drift: int = 0
    scan: bool = False
    mislabelled: float = 0.0

    def workloads(self) -> dict[str, Workload]:
        """Fresh makers of sessions, by class."""
        loads: dict[str, Workload] = {
            "agent": Agents(), "chat": Chats(), "rag": Corpora(drift=self.drift), "single": Singles(),
        }  # fmt: skip
        return {name: loads[name] for name in self.shares}

    def describe(self) -> str:
        """One line."""
        parts = [f"{self.shares[name]:.0%} {name} ({load.describe()})" for name, load in self.workloads().items()]
        if self.bursts:
            parts.append(f"sessions begin {_BURST[0]:g}x as fast for {_BURST[1]:g} s, {_CALM[0]:g}x for {_CALM[1]:g} s")
        if self.scan:
            parts.append(f"{SCAN_SHARE:.1%} of the requests are a crawler's, which reads each chunk once")
        if self.mislabelled:
            parts.append(f"{self.mislabelled:.0%} of the tags are wrong")
        return "; ".join(parts)


TRACES: Registry[Recipe] = Registry("trace")
"""Recipes by name."""
TRACES.add("mixed")(Recipe())
for _name in SHARES:
    TRACES.add(_name)(Recipe({_name: 1.0}))
TRACES.add("bursts")(Recipe(bursts=True))
TRACES.add("drift")(Recipe(drift=30))
TRACES.add("scan")(Recipe(scan=True))
TRACES.add("mislabelled20")(Recipe(mislabelled=0.2))
TRACES.add("mislabelled100")(Recipe(mislabelled=1.0))


def generate(name: str, seed: int, length: int = LENGTH, rate: float = RATE) -> Trace:
    """Make a trace.

    Parameters
    ----------
    name
        Of `TRACES`.
    seed
        Of everything that is drawn.
    length
        Requests.
    rate
        Requests per second in the long run.

    Raises
    ------
    InputError
        If the name is unknown, or length or rate is not above 0.
    """
    recipe = TRACES.get(name)
    if length < 1 or not 0.0 < rate < 1e6:
        raise InputError(f"a trace of {length} requests at {rate} per second; both must be above 0")
    requests = draw(recipe, seed, length, rate)
    engines = f"{rate / ENGINE_RATE:.2g} engines with {ENGINE_RATE:g} requests/s each"
    about = f"{name}, seed {seed}, {length:,} requests of {engines}: {recipe.describe()}"
    trace = Trace(name, tuple(requests), about)
    return mislabel(trace, recipe.mislabelled, seed) if recipe.mislabelled else trace


def draw(recipe: Recipe, seed: int, length: int, rate: float) -> list[Request]:
    """The requests of a recipe, tagged right, by arrival; see `generate`."""
    # One seed for all recipes: wrong tags, for instance, come on the same requests as right ones.
    return list(_merged(recipe, Random(seed), length, rate))


def mislabel(trace: Trace, share: float, seed: int) -> Trace:
    """The trace with wrong tags: for ``share`` 1 every class has another's (`MISTAKES`), below that some, at random.

    Raises
    ------
    InputError
        If the share is not from 0 to 1.
    """
    if not 0.0 <= share <= 1.0:
        raise InputError(f"share of wrong tags is {share}; 0 to 1 is allowed")
    random = Random(f"mislabel {seed}")
    names = sorted(MISTAKES)

    def wrong(workload: str) -> str:
        if share == 1.0:
            return MISTAKES.get(workload, workload)
        return random.choice([name for name in names if name != workload])

    changed = [
        r._replace(use=r.use._replace(workload=wrong(r.use.workload))) if random.random() < share else r
        for r in trace.requests
    ]
    return replace(trace, requests=tuple(changed))


def _merged(recipe: Recipe, random: Random, length: int, rate: float) -> Iterator[Request]:
    """The first ``length`` requests of all sessions, and of the crawler, by arrival."""
    coming: list[tuple[float, int, Request]] = []
    loads = recipe.workloads()
    if recipe.scan:
        for request in _scan(loads["rag"], random, int(length * SCAN_SHARE), length / rate):
            coming.append((request.arrival, len(coming), request))
        rate *= 1.0 - SCAN_SHARE
        heapq.heapify(coming)
    weights = [share / loads[name].turns for name, share in recipe.shares.items()]
    starts = _starts(random, rate * sum(weights), recipe.bursts)
    made = len(coming)
    given = 0
    for number, start in enumerate(starts):
        while coming and coming[0][0] <= start:
            yield heapq.heappop(coming)[2]
            given += 1
            if given == length:
                return
        (name,) = random.choices(list(recipe.shares), weights)
        for request in loads[name].session(random, f"{name}-{number}", start):
            made += 1
            if request.arrival >= 0.0:
                heapq.heappush(coming, (request.arrival, made, request))


def _starts(random: Random, rate: float, bursts: bool) -> Iterator[float]:
    """Seconds at which sessions begin: a Poisson process, its rate switched between two values for bursts."""
    now, factor, until = -WARM_UP, 1.0, float("inf")
    if bursts:
        factor, until = _CALM[0], now + random.expovariate(1.0 / _CALM[1])
    while True:
        step = random.expovariate(rate * factor)
        if now + step < until:
            now += step
            yield now
        else:  # without memory: begin anew at the new rate
            now = until
            factor, mean = _CALM if factor == _BURST[0] else _BURST
            until = now + random.expovariate(1.0 / mean)


def _scan(load: Workload, random: Random, count: int, span: float) -> Iterator[Request]:
    assert isinstance(load, Corpora)
    step = load.per_request
    for number in range(count):
        corpus, at = divmod(number * step, load.chunks)
        chunks = [(at + n) % load.chunks for n in range(step)]
        yield load.ask(random, corpus % load.corpora, chunks, span * (1.0 + number / count) / 3.0)
