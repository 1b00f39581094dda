"""The scheduler's half of the connector: what becomes of each request, in well under a millisecond per step."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blendkv.blend import parse_mode
from blendkv.blend.gate import REASON, Gate
from blendkv.engines.vllm.admission import Admission, Held
from blendkv.engines.vllm.messages import BlendMetadata, Compute, Load, NotBlendedError, WorkerReport, reason_of
from blendkv.engines.vllm.plan import Plan, Planner
from blendkv.engines.vllm.prefetch import Prefetcher
from blendkv.engines.vllm.settings import ConnectorSettings
from blendkv.engines.vllm.stats import BlendStats
from blendkv.market.base import NOBODY, Use
from blendkv.types import RecipeKind

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_DECODE_TOKENS = 16
"""A request that runs more tokens than this in a step is prefilling; a step without one has time for other work."""
_QUEUE_TOKENS = 1 << 17
"""Most tokens of missing chunks that wait to be computed in the background."""


@dataclass
class _State:
    """What is known of a request: its plan or why it has none, whether a blend was handed out, and what came of it."""

    plan: Plan | None = None
    mode: str | None = None
    use: Use | None = None
    reason: str | None = None
    computing: bool = False
    loaded: bool = False
    failure: str | None = None
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Missing:
    recipe: RecipeKind
    prefix: tuple[int, ...]
    chunk: tuple[int, ...]
    tenant: str
    use: Use = field(default=NOBODY, compare=False)  # of whoever asked first: it is computed once


class BlendScheduler:
    """Decides per request: blend now, wait, or full prefill with a counted reason.

    Parameters
    ----------
    settings
        Of the connector.
    planner, prefetcher
        Who looks requests up, and who reads ahead.
    step_tokens
        Most rows that blends run in one step.
    refresh
        Called at most once per step before a request is planned: brings the finder up to date.
    gate
        What the quality gate allows; all of it by default.

    Attributes
    ----------
    admission
        Who is held back for the sake of others; None: nobody is.
    stats
        Figures since they were last taken.
    outcomes
        Finished requests: ``blended``, ``prefix`` (the local prefix cache left nothing worth a blend), ``plain``
        (nothing was asked for), and the reasons for full prefill.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        planner: Planner,
        prefetcher: Prefetcher,
        step_tokens: int,
        refresh: Callable[[], None],
        gate: Gate | None = None,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.stats = BlendStats()
        self.admission: Admission | None = None
        self._settings, self._planner, self._prefetcher = settings, planner, prefetcher
        self._step_tokens, self._refresh = step_tokens, refresh
        self._states: dict[str, _State] = {}
        self._loads: list[Load] = []
        self._rows = 0
        self._refreshed = False
        self._urgent: OrderedDict[_Missing, None] = OrderedDict()
        self._background: OrderedDict[_Missing, None] = OrderedDict()
        self._background_tokens = 0
        self._refused: str | None = None
        self._warned: set[str] = set()
        self._gate = gate or Gate()
        if self._gate.closed is not None:
            self.refuse(REASON, self._gate.closed)

    @property
    def has_work(self) -> bool:
        """Whether chunks wait to be computed: the engine should step on even without requests."""
        return bool(self._background or self._urgent)

    def refuse(self, reason: str, why: str) -> None:
        """Prefill every request in full from now on."""
        self._refused = reason
        _log.warning("every request is prefilled in full (%s): %s", reason, why)

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens behind the ``computed`` ones that a blend will provide; None to be asked again in the next step."""
        if self._admission(lambda admission: admission.holds(request, computed), False):
            return None
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = self._new_state(request)
        if state.plan is None or state.failure is not None:
            return 0
        wanted = request.num_prompt_tokens - 1 - computed
        if wanted <= 0:
            state.reason = "prefix"
            return 0
        try:
            return self._when_ready(request.request_id, state, state.plan, wanted, computed)
        except Exception as error:  # whatever it is, the request can be prefilled
            self._give_up(state, reason_of(error), error)
        return 0

    def arrived(self, request: Any) -> None:
        """A request waits from now on."""
        self._admission(lambda admission: admission.arrives(request), None)

    def _admission(self, ask: Callable[[Admission], _T], otherwise: _T) -> _T:
        if self.admission is None:
            return otherwise
        try:
            return ask(self.admission)
        except Exception as error:  # an error here would end the engine
            self.admission = None
            self.outcomes["admission_off"] += 1
            _log.warning("admission failed and is off, no request is held back from now on: %s", error, exc_info=error)
            return otherwise

    def _new_state(self, request: Any) -> _State:
        state = _State()
        try:
            if not self._refreshed:
                self._refresh()
                self._refreshed = True
            state.plan = self._planner.plan(request)
            if state.plan is None:
                state.reason = "plain"
                return state
            state.mode, state.use = state.plan.mode, state.plan.use
            if self._refused is not None:
                state.plan, state.reason = None, self._refused
            elif (why := self._gate.check(parse_mode(state.plan.mode))) is not None:
                self._give_up(state, REASON, why)
        except Exception as error:  # an error here would end the engine
            self._give_up(state, reason_of(error), error)
        return state

    def _when_ready(self, request_id: str, state: _State, plan: Plan, wanted: int, computed: int) -> int | None:
        """The answer for a request with a plan.

        Raises
        ------
        NotBlendedError, TimeoutError, StoreError
            If it is to be prefilled in full.
        """
        if not state.computing:
            self._check_worth(plan, wanted, computed)
        if not self._prefetcher.ready(request_id, plan.stored, plan.use):
            return None
        if not state.computing:
            state.computing = True
            for item in _items(plan.missing):
                self._urgent[item] = None
        if self._urgent and any(item in self._urgent for item in _items(plan.missing)):
            return None
        if self._rows and self._rows + plan.rows > self._step_tokens:
            return None
        return wanted

    def _check_worth(self, plan: Plan, wanted: int, computed: int) -> None:
        if self._settings.min_saving < 0:
            return
        cost = plan.rows + plan.missing.tokens
        if cost <= (1 - self._settings.min_saving) * wanted and plan.rows <= self._step_tokens:
            return
        for item in _items(plan.missing):
            self._later(item)
        if computed and plan.reused:
            raise NotBlendedError("prefix", "the local prefix cache leaves less to prefill than a blend would run")
        if plan.rows > self._step_tokens and plan.reused:
            raise NotBlendedError("step_tokens", f"{plan.rows} rows are more than a step takes ({self._step_tokens})")
        reason = "little_stored" if plan.reused else "nothing_stored"
        raise NotBlendedError(reason, f"{plan.reused} of {wanted} tokens are stored: a prefill costs less than a blend")

    def _later(self, item: _Missing) -> None:
        """Compute a chunk when there is time; the oldest are forgotten when too many wait."""
        if item in self._background:
            return
        self._background[item] = None
        self._background_tokens += len(item.chunk)
        while self._background_tokens > _QUEUE_TOKENS:
            forgotten, _ = self._background.popitem(last=False)
            self._background_tokens -= len(forgotten.chunk)
            self.outcomes["chunks_not_computed"] += 1

    def _give_up(self, state: _State, reason: str, why: object) -> None:
        """Full prefill for this request; why is said once per reason, and counted when the request ends."""
        state.plan, state.reason = None, reason
        if reason not in self._warned and reason not in ("mode", "prefix", "nothing_stored", "little_stored"):
            self._warned.add(reason)
            _log.warning("prefilled in full (%s; said once per reason): %s", reason, why)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """A request got its blocks; ``external`` of its tokens are the blend's."""
        taken = [block_id for group in block_ids for block_id in group]
        self._admission(lambda admission: admission.begins(request, taken), None)
        state = self._states.get(request.request_id)
        if state is None or state.plan is None or external == 0:
            return
        total = request.num_prompt_tokens - 1
        plan = state.plan
        ids = tuple(request.prompt_token_ids[:total])
        blocks = tuple(tuple(group) for group in block_ids)
        written = total - external
        whose = plan.tenant, plan.use
        self._loads.append(
            Load(request.request_id, ids, plan.pieces, plan.recipe, plan.settings, blocks, written, *whose)
        )
        self._rows += plan.rows
        state.loaded = True

    def metadata(self, scheduled_tokens: dict[str, int]) -> BlendMetadata:
        """The worker's work in this step; ``scheduled_tokens`` says what each request runs."""
        loads, self._loads = self._loads, []
        self._rows, self._refreshed = 0, False
        left = self._settings.compute_tokens
        computes = _grouped(_take(self._urgent, left))
        left -= sum(c.tokens for c in computes)
        prefilling = bool(loads) or any(n > _DECODE_TOKENS for n in scheduled_tokens.values())
        if left > 0 and not prefilling:
            later = _take(self._background, left)
            self._background_tokens -= sum(len(item.chunk) for item in later)
            computes += _grouped(later)
        return BlendMetadata(computes, loads)

    def heard(self, report: WorkerReport) -> None:
        """Take in what the worker did."""
        if report.refused is not None and self._refused is None:
            self.refuse("model", report.refused)
        for request_id, reason in report.failures.items():
            if (state := self._states.get(request_id)) is not None:
                state.failure = reason
        for request_id, done in report.reports.items():
            if (state := self._states.get(request_id)) is not None:
                state.report = done

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]] = ()) -> dict[str, Any] | None:
        """Forget a request and say what became of it, in its blocks; None for one that asked for nothing."""
        left = [block_id for group in block_ids for block_id in group]
        held = self._admission(lambda admission: admission.ends(request, left), None)
        if held is not None:
            self.stats.add("held", held.reason, 1)
            self.stats.add("held_seconds", held.reason, held.seconds)
        self._prefetcher.drop(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is None:  # aborted before it was looked at, or while it was held back
            return None
        blended = state.loaded and state.failure is None
        reason = None if blended else state.failure or state.reason or "aborted"
        self.outcomes["blended" if blended else str(reason)] += 1
        outcome = "blended" if blended else "prefix" if reason == "prefix" else "full"
        done = (state.report or {}) if blended else {}
        self.stats.record("blended" if blended else str(reason), done, state.use)
        if reason == "plain" and held is None:
            return None
        return {"outcome": outcome, "reason": reason, "mode": state.mode, **done, **_told(held)}

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()


def _told(held: Held | None) -> dict[str, Any]:
    return {} if held is None else {"held_seconds": held.seconds, "held_for": held.reason}


def _items(missing: Compute) -> list[_Missing]:
    return [_Missing(missing.recipe, missing.prefix, chunk, missing.tenant, missing.use) for chunk in missing.chunks]


def _take(queue: OrderedDict[_Missing, None], tokens: int) -> list[_Missing]:
    """Remove items from the front until ``tokens`` are reached; one at least, however long."""
    taken: list[_Missing] = []
    size = 0
    while queue and (not taken or size + len(next(iter(queue)).chunk) <= tokens):
        item, _ = queue.popitem(last=False)
        taken.append(item)
        size += len(item.chunk)
    return taken


def _grouped(items: list[_Missing]) -> list[Compute]:
    """One `Compute` per recipe and user."""
    groups: dict[tuple[RecipeKind, tuple[int, ...], str, Use], list[tuple[int, ...]]] = {}
    for item in items:
        groups.setdefault((item.recipe, item.prefix, item.tenant, item.use), []).append(item.chunk)
    return [
        Compute(recipe, prefix, tuple(chunks), tenant, use) for (recipe, prefix, tenant, use), chunks in groups.items()
    ]
