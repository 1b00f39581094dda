"""Who waits in vLLM's scheduler: a request that would push out of the prefix cache what is worth more than itself.

A connector may answer "not yet" when the scheduler asks how much of a prompt it can provide; the scheduler then goes on
with the next request and asks again in the next step. So a request can be held back, and nothing else is changed: which
blocks leave is vLLM's own choice, the ones used longest ago.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from blendkv.engines.vllm.holdings import Holdings
from blendkv.engines.vllm.plan import use_of
from blendkv.errors import InputError
from blendkv.market.admission import TARGETS, AdmissionSettings
from blendkv.market.base import NOBODY, UNKNOWN, Use
from blendkv.market.policy import FAVOUR
from blendkv.market.survival import FIRST_EDGE

_log = logging.getLogger(__name__)
_AGAIN = 0.02
"""Seconds for which a request that is held is not looked at again: it is polled in every step."""
_IMMINENT = 1.0 / FIRST_EDGE
"""Worth of a block that a request waits to use, in uses per second: the most that the market tells apart."""


class Held(NamedTuple):
    """How long a request was held back, in seconds, and what for.

    ``reason`` is ``waiting`` (most of what it would have pushed out, requests that wait were about to use) or
    ``expected`` (its class and session let expect that it is used).
    """

    seconds: float
    reason: str


@dataclass
class _Waiting:
    use: Use
    arrived: float
    hits: list[Any]
    since: float | None = None
    looked: float = 0.0
    reason: str = ""


@dataclass
class _Running:
    holding: str
    held: Held | None


class Admission:
    """Holds requests back in vLLM's scheduler, none for longer than the target of its class.

    The market's rule of what may come in, for requests: one is held if the blocks that it would push out are worth more
    than its own blocks over `blendkv.market.policy.FAVOUR`. What it is held for counts less and less as it waits, and
    nothing once it has waited as long as its class may (`TARGETS`). Nothing is held while nothing else runs or waits.
    What requests will decode is not known and does not count.

    Parameters
    ----------
    holdings
        Of vLLM's prefix cache.
    targets
        Seconds by workload class, in place of `TARGETS`' own.
    clock
        Seconds that never go back.

    Raises
    ------
    InputError
        If a target makes no sense.
    """

    def __init__(
        self,
        holdings: Holdings,
        targets: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holdings, self._clock = holdings, clock
        self._targets = AdmissionSettings({**TARGETS, **(targets or {})}).targets
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, _Running] = {}
        self._holding: set[str] = set()
        self._wanted: Counter[Any] = Counter()  # hashes of blocks that requests wait to use

    def arrives(self, request: Any) -> None:
        """A request waits from now on; one that is known is ignored."""
        request_id = request.request_id
        if request_id in self._waiting or request_id in self._running:
            return
        hits = self._holdings.hits(request)
        self._waiting[request_id] = _Waiting(tagged(request), self._clock(), hits)
        self._want(self._waiting[request_id], 1)

    def holds(self, request: Any, computed: int) -> bool:
        """Whether a request, of which ``computed`` tokens are in the prefix cache, has to go on waiting."""
        request_id = request.request_id
        if request_id in self._running:  # it was preempted: it has had its turn
            return False
        self.arrives(request)
        waiting, now = self._waiting[request_id], self._clock()
        if request_id in self._holding and now - waiting.looked < _AGAIN and self._others(request_id):
            return True
        waiting.looked = now
        reason = self._why(request, waiting, computed, now) if self._others(request_id) else ""
        if not reason:
            self._let_go(request_id)
            return False
        if request_id not in self._holding:  # what it wants is no reason to hold others: they would wait for each other
            self._holding.add(request_id)
            self._want(waiting, -1)
        waiting.since = now if waiting.since is None else waiting.since
        waiting.reason = reason
        return True

    def begins(self, request: Any, block_ids: Iterable[int]) -> None:
        """A request got its blocks."""
        if request.request_id in self._running:
            return
        self.arrives(request)
        waiting, now = self._left(request.request_id), self._clock()
        assert waiting is not None
        holding = self._holdings.begins(request.request_id, waiting.use, block_ids, now)
        self._running[request.request_id] = _Running(holding, _held(waiting, now))

    def ends(self, request: Any, block_ids: Iterable[int]) -> Held | None:
        """A request has ended, begun or not; return how long it was held."""
        now = self._clock()
        running = self._running.pop(request.request_id, None)
        if running is not None:
            self._holdings.ends(running.holding, block_ids, now)
            return running.held
        waiting = self._left(request.request_id)
        return None if waiting is None else _held(waiting, now)

    def _left(self, request_id: str) -> _Waiting | None:
        """A request does not wait any longer."""
        self._let_go(request_id)
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._want(waiting, -1)
        return waiting

    def _let_go(self, request_id: str) -> None:
        """A request is not held any longer."""
        if request_id in self._holding:
            self._holding.remove(request_id)
            self._want(self._waiting[request_id], 1)

    def _want(self, waiting: _Waiting, count: int) -> None:
        for hit in waiting.hits:
            self._wanted[hit] += count
            if not self._wanted[hit]:
                del self._wanted[hit]

    def _others(self, request_id: str) -> bool:
        """Whether any other request runs, or waits without being held."""
        return bool(self._running) or len(self._waiting) > len(self._holding | {request_id})

    def _why(self, request: Any, waiting: _Waiting, computed: int, now: float) -> str:
        """What it has to wait for; empty if it is let in."""
        target = self._targets.get(waiting.use.workload, self._targets[UNKNOWN])
        fading = 1.0 - (now - waiting.arrived) / target
        if fading <= 0.0:
            return ""
        needed = self._holdings.needed(request.num_tokens, computed)
        own = needed * self._holdings.worth_of_newcomer(request.request_id, waiting.use, now)
        enough = own / (FAVOUR * fading)
        mine = set(waiting.hits)
        known: dict[str, float] = {}
        lost = {"waiting": 0.0, "expected": 0.0}
        for hash, holding in self._holdings.leaving(needed, mine):
            if self._wanted.get(hash, 0) > 0:
                lost["waiting"] += _IMMINENT
            elif holding is not None:
                if holding not in known:
                    known[holding] = self._holdings.worth(holding, now)
                lost["expected"] += known[holding]
            if sum(lost.values()) > enough:
                return max(lost, key=lambda reason: lost[reason])
        return ""


def tagged(request: Any) -> Use:
    """Whose work a vLLM request is, as far as it says so in words that can be taken."""
    wanted = (request.kv_transfer_params or {}).get("blendkv")
    if not isinstance(wanted, Mapping):
        return NOBODY
    try:
        return use_of(wanted)
    except InputError as error:  # the plan refuses it with that reason; here it is nobody's
        _log.debug("request %s: %s", request.request_id, error)
        return NOBODY


def _held(waiting: _Waiting, now: float) -> Held | None:
    return None if waiting.since is None else Held(now - waiting.since, waiting.reason)
