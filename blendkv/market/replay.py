"""The cache simulator: a trace through a real policy, with a tier of so many bytes in front of recomputation.

Block keys, sizes and costs are all that there is of KV; everything that decides is the policy's own code. A chunk that
is missing is computed in its place, and stored; computing its KV alone, apart from the answer, is not charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from blendkv.errors import BlendKVError, InputError
from blendkv.market.base import EvictionPolicy, Item, Use
from blendkv.market.costs import CostModel
from blendkv.market.eviction import AdmitsAll
from blendkv.market.hints import Hinted
from blendkv.market.trace import Block, Request, Trace


class Slower(NamedTuple):
    """A tier behind the first one, which has whatever was stored once: bytes per second, and seconds per block."""

    load_rate: float
    load_latency: float


class Found(NamedTuple):
    """What the cache has of a request.

    Attributes
    ----------
    total
        Seconds of prefill without any cache.
    saved
        Seconds of those that hits save, net of loads and of what a blend recomputes.
    asked, hit
        Tokens of prefix blocks and chunks, and those of them that the tier holds.
    """

    total: float
    saved: float
    asked: int
    hit: int

    @property
    def seconds(self) -> float:
        """From the begin of its work to the first token."""
        return self.total - self.saved


@dataclass(slots=True)
class Tally:
    """Sums over requests.

    Attributes
    ----------
    requests, tokens, asked, hit
        Requests, tokens of their prompts, tokens of prefix blocks and chunks, and those that the tier held.
    total, saved
        Seconds of prefill without a cache, and those saved; see `Found`.
    evictions, regretted
        Blocks that left for these requests; blocks that these asked for and that had left not longer ago than it takes
        to write the tier once over.
    written
        Bytes stored for these requests.
    """

    requests: int = 0
    tokens: int = 0
    asked: int = 0
    hit: int = 0
    total: float = 0.0
    saved: float = 0.0
    evictions: int = 0
    regretted: int = 0
    written: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were hits."""
        return self.hit / self.tokens if self.tokens else 0.0

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(*(getattr(self, name) + getattr(other, name) for name in Tally.__slots__))


class _Seen(NamedTuple):
    """One block of a request; a ``chained`` one is of no use without the one before it."""

    key: str
    item: Item
    chained: bool
    held: bool


class Cache:
    """One tier under a policy, as an engine uses it; not safe to use from several threads.

    As in vLLM, a request's blocks are told of from its end to its begin, so that the tail of a prefix leaves before its
    head where recency decides. Blocks of the request that is worked on cannot leave.

    Parameters
    ----------
    capacity
        Bytes of the tier.
    policy
        Decides what leaves and what is let in.
    costs
        Seconds of computing and loading.
    slower
        A tier behind this one; None recomputes.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy, costs: CostModel, slower: Slower | None = None) -> None:
        if capacity < 0:
            raise InputError(f"capacity is {capacity} bytes; 0 or more is allowed")
        self.capacity = capacity
        self.policy = policy
        self.costs = costs
        self.held: dict[str, int] = {}
        self.used = 0
        self.tallies: dict[str, Tally] = {}
        self._hinted = policy if isinstance(policy, Hinted) else None
        self._working: set[str] = set()  # sessions with a tool call in flight
        self._written = 0
        self._left: dict[str, int] = {}  # bytes written when a block left, of those not held since
        self._slow = None if slower is None else CostModel(
            costs.linear, costs.quadratic, slower.load_rate, slower.load_latency, costs.token_bytes, costs.blend_budget
        )  # fmt: skip
        self._stored: set[str] = set()

    def peek(self, request: Request) -> Found:
        """What a request would find now; nothing changes, and nothing is told to the policy."""
        return self._look(request)[0]

    def arrives(self, request: Request, now: float) -> None:
        """A request is there; it may have to wait. Ends the tool call of its session."""
        if request.use.session in self._working:
            self._working.discard(request.use.session)
            if self._hinted is not None:
                self._hinted.hint(request.use.session, "tool_finished", 0.0, now)

    def serve(self, request: Request, now: float) -> Found:
        """Work on a request: use what is held, store what is not as far as the policy lets it in."""
        found, seen, end = self._look(request)
        tally = self.tallies.get(request.use.workload)
        if tally is None:
            tally = self.tallies[request.use.workload] = Tally()
        tally.requests += 1
        tally.tokens += end
        tally.total += found.total
        tally.saved += found.saved
        tally.asked += found.asked
        tally.hit += found.hit
        self._miss(seen, tally)
        at = end - request.fresh
        for block in request.made:
            seen.append(_Seen(block.key, self._item(block, at, False, seen[-1].key if seen else ""), True, False))
            at += block.tokens
        self._store(request, seen, tally, now)
        return found

    def answered(self, request: Request, now: float) -> None:
        """Pass on what the session says of itself once it has its answer."""
        if request.hint is None:
            return
        if request.hint == "tool_started":
            self._working.add(request.use.session)
        if self._hinted is not None:
            self._hinted.hint(request.use.session, request.hint, request.ttl, now)

    def _look(self, request: Request) -> tuple[Found, list[_Seen], int]:
        """What is found, every block that is asked for in prompt order, and the tokens of the prompt."""
        seen: list[_Seen] = []
        at = hit = 0
        saved = 0.0
        whole = True
        after = ""
        for block in request.prefix:
            held = block.key in self.held
            whole = whole and (held or block.key in self._stored)
            item = self._item(block, at, False, after)
            if whole:
                saved += self._gain(block, at, False, item, held)
                hit += block.tokens if held else 0
            seen.append(_Seen(block.key, item, True, held))
            after = block.key
            at += block.tokens
        for block in request.chunks:
            held = block.key in self.held
            item = self._item(block, at, True, "")
            if held or block.key in self._stored:
                saved += self._gain(block, at, True, item, held)
                hit += block.tokens if held else 0
            seen.append(_Seen(block.key, item, False, held))
            at += block.tokens
        asked, at = at, at + request.fresh
        return Found(self.costs.prefill(0, at), saved, asked, hit), seen, at

    def _item(self, block: Block, at: int, blended: bool, after: str) -> Item:
        saved = self.costs.saved(at, block.tokens, blended)
        if self._slow is not None:
            saved = max(0.0, saved - self._slow.saved(at, block.tokens, blended))
        return Item(block.tokens * self.costs.token_bytes, saved, after)

    def _gain(self, block: Block, at: int, blended: bool, item: Item, held: bool) -> float:
        """Seconds saved by a block that this tier holds, or only the slower one does."""
        below = 0.0 if self._slow is None else self._slow.saved(at, block.tokens, blended)
        return below + item.saved if held else below

    def _miss(self, seen: Sequence[_Seen], tally: Tally) -> None:
        for key, _, _, held in seen:
            if held:
                continue
            left = self._left.pop(key, None)
            if left is not None and self._written - left <= self.capacity:
                tally.regretted += 1

    def _store(self, request: Request, seen: Sequence[_Seen], tally: Tally, now: float) -> None:
        """Let blocks in in prompt order; tell the policy of them, and of those used, from the end to the begin."""
        keep = {entry.key for entry in seen}
        told: list[tuple[_Seen, bool]] = []
        whole = True
        for entry in seen:
            if self._slow is not None:
                self._stored.add(entry.key)
            if entry.chained and not whole:  # of no use without the block that was refused
                continue
            if entry.key in self.held:
                told.append((entry, False))
            elif self._let_in(entry, request, keep, tally, now):
                told.append((entry, True))
            elif entry.chained:
                whole = False
        for entry, new in reversed(told):
            if new:
                self.policy.added(entry.key, entry.item, request.use, now)
            else:
                self.policy.touched(entry.key, request.use, now)

    def _let_in(self, entry: _Seen, request: Request, keep: set[str], tally: Tally, now: float) -> bool:
        """Whether there is room for a block, or the policy makes some; it is held from then on."""
        nbytes = entry.item.nbytes
        if nbytes > self.capacity:
            return False
        leaving: Sequence[str] = ()
        excess = self.used + nbytes - self.capacity
        if excess > 0:
            leaving = self.policy.victims(excess, keep, now)
            if sum(self._size(key, keep) for key in leaving) < excess:
                return False
        if not self.policy.admits(entry.key, entry.item, request.use, leaving, now):
            return False
        for key in leaving:
            self.used -= self.held.pop(key)
            self._left[key] = self._written
            self.policy.removed(key, now)
        self.held[entry.key] = nbytes
        self.used += nbytes
        self._written += nbytes
        tally.evictions += len(leaving)
        tally.written += nbytes
        return True

    def _size(self, key: str, keep: set[str]) -> int:
        if key in keep or key not in self.held:
            raise BlendKVError(f"{type(self.policy).__name__} names {key} as a victim, which is in use or not held")
        return self.held[key]


class KeepsAll(AdmitsAll):
    """Lets everything in and names no victims: what is there stays, and what does not fit is refused."""

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """Nothing to note."""

    def touched(self, key: str, use: Use, now: float) -> None:
        """Nothing to note."""

    def removed(self, key: str, now: float) -> None:
        """Nothing to note."""

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """None."""
        return []


class Timed:
    """A policy whose time is taken: passes every call on, and counts calls and seconds.

    Reading the clock is part of it, about 0.1 us per call.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self.calls = 0
        self.seconds = 0.0
        for name in ("added", "touched", "removed", "victims", "admits", "hint"):
            call = getattr(policy, name, None)
            if call is not None:
                setattr(self, name, self._timed(call))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*arguments: Any) -> Any:
            began = clock()
            result = call(*arguments)
            self.seconds += clock() - began
            self.calls += 1
            return result

        return timed


@dataclass(frozen=True)
class Replayed:
    """Result of a replay.

    Attributes
    ----------
    classes
        Sums by workload class, as the requests are tagged.
    services
        Seconds of work per request, in the trace's order.
    wall
        Seconds that the replay took.
    """

    classes: Mapping[str, Tally]
    services: Sequence[float]
    wall: float

    @property
    def all(self) -> Tally:
        """Every class together."""
        found = Tally()
        for tally in self.classes.values():
            found = found.plus(tally)
        return found


def replay(trace: Trace, cache: Cache) -> Replayed:
    """Send a trace through a cache, request by request, each done in the moment in which it arrives.

    Waiting is not simulated (see `blendkv.market.queueing`); a session's hint is given with its answer, at once.

    Raises
    ------
    InputError
        If the trace cannot be replayed.
    """
    trace.check()
    began = time.perf_counter()
    services: list[float] = []
    for request in trace.requests:
        cache.arrives(request, request.arrival)
        services.append(cache.serve(request, request.arrival).seconds)
        cache.answered(request, request.arrival)
    return Replayed(cache.tallies, services, time.perf_counter() - began)
