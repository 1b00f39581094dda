"""What must hold before `bench market` gives a ratio."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from blendkv.market.base import EvictionPolicy, Use
from blendkv.market.costs import CostModel
from blendkv.market.generate import generate
from blendkv.market.replay import Cache, replay
from blendkv.market.trace import Block, Request, Trace
from blendkv.market.workloads import Zipf

Make = Callable[[int, Trace], EvictionPolicy]
"""Makes a policy for a tier of so many bytes, and for the trace where it must know the future."""

_AUDITED = 400
_UNIT_REQUESTS, _UNIT_KEYS, _UNIT_HELD = 3000, 300, 30
_UNIT = CostModel(linear=1e-5, quadratic=0.0, load_rate=1e12, load_latency=0.0, token_bytes=1, blend_budget=0.0)


def audit(trace: Trace, cache: Cache) -> str | None:
    """Replay a trace and count apart from the cache; one line on the first thing that does not add up."""
    for number, request in enumerate(trace.requests):
        usable, whole = 0, True
        for block in request.prefix:
            whole = whole and block.key in cache.held
            usable += block.tokens if whole else 0
        usable += sum(block.tokens for block in request.chunks if block.key in cache.held)
        missing = request.tokens - request.fresh - usable
        cache.arrives(request, request.arrival)
        found = cache.serve(request, request.arrival)
        cache.answered(request, request.arrival)
        if found.hit != usable or found.hit + missing != found.asked:
            return f"request {number}: {found.hit} hits, {usable} usable and {missing} missing of {found.asked} tokens"
        held = sum(cache.held.values())
        if not cache.used == held <= cache.capacity:
            return f"request {number}: {held} bytes held, {cache.used} counted, {cache.capacity} allowed"
        if not 0.0 <= found.saved <= found.total:
            return f"request {number}: {found.saved} of {found.total} seconds saved"
    return None


def unit_trace(seed: int) -> Trace:
    """Single chunks of one size and cost: the case in which Belady's rule is optimal."""
    random, law = Random(seed), Zipf(_UNIT_KEYS)
    requests = [Request(float(n), Use(), chunks=(Block(f"unit-{law(random)}", 512),)) for n in range(_UNIT_REQUESTS)]
    return Trace("unit", tuple(requests))


def problems(policies: dict[str, Make], costs: CostModel, offline: str = "belady") -> list[str]:
    """A line per check that is red.

    Conservation: what hits and what misses add up to what is asked for, and never are more bytes held than allowed.
    Belady: with blocks of one size and cost, no policy has more hits than the one that knows the future.
    """
    found: list[str] = []
    trace = generate("mixed", 0, _AUDITED)
    capacity = trace.distinct_tokens * costs.token_bytes // 20
    for name, make in policies.items():
        told = audit(trace, Cache(capacity, make(capacity, trace), costs))
        if told is not None:
            found.append(f"conservation, {name}: {told}")
    if offline in policies:
        units = unit_trace(0)
        room = _UNIT_HELD * 512 * _UNIT.token_bytes
        hits = {name: replay(units, Cache(room, make(room, units), _UNIT)).all.hit for name, make in policies.items()}
        found += [
            f"Belady: {name} has {count} token hits on blocks of one size, more than {hits[offline]} of {offline}"
            for name, count in hits.items()
            if count > hits[offline]
        ]
    return found
