"""The door before the engine: who waits is let in by class and share, and who would wait too long is told so."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType

from blendkv.market.admission import AdmissionQueue, AdmissionSettings, Applicant
from blendkv.market.base import Use
from blendkv.observe.metrics import Metrics
from blendkv.serve.errors import ApiError

_SMOOTHING = 0.2
_FIRST_GUESS = 1.0


class Turn:
    """A place in the engine: enter it to wait for it, leave it to let the next one in.

    Attributes
    ----------
    waited
        Seconds until it was let in.
    reason
        What made it wait: ``pressure``, ``share``, ``class`` or ``capacity``; empty if nothing did.
    use, tenant
        Whose it is.
    expected
        Seconds of work that its tenant's share was charged when it was let in.
    """

    def __init__(self, door: Door, use: Use, tenant: str) -> None:
        self.waited = 0.0
        self.reason = ""
        self.use, self.tenant = use, tenant
        self.expected = 0.0
        self._door, self._began = door, 0.0

    async def __aenter__(self) -> Turn:
        await self._door.wait(self)
        self._began = self._door.now()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._door.leave(self, self._door.now() - self._began, error is None)


class Door:
    """Lets ``settings.slots`` requests work at once; belongs to one event loop."""

    def __init__(self, settings: AdmissionSettings, metrics: Metrics) -> None:
        self._queue = AdmissionQueue(settings)
        self._free = settings.slots
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._seconds: dict[str, float] = {}  # what a request of a class takes, by those that were served
        self._metrics = metrics

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def turn(self, use: Use, tenant: str) -> Turn:
        """A place for a request of that class, session and tenant."""
        return Turn(self, use, tenant)

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return asyncio.get_running_loop().time()

    async def wait(self, turn: Turn) -> None:
        """Wait until there is a place.

        Raises
        ------
        ApiError
            429, with the seconds after which to come again, if the wait would be too long.
        """
        began, workload = self.now(), self._queue.known(turn.use.workload)
        turn.expected = self._seconds.get(workload, _FIRST_GUESS)
        applicant = Applicant(
            str(next(self._numbers)), workload, turn.tenant, began, turn.expected, session=turn.use.session
        )
        refusal = self._queue.offer(applicant)
        if refusal is not None:
            self._metrics.refused.labels(workload, refusal.reason).inc()
            message = f"too much is waiting ({refusal.reason}); come again in {refusal.retry_after} s"
            raise ApiError(429, message, kind="rate_limit_error", code=refusal.reason, retry_after=refusal.retry_after)
        place = self._waiting[applicant.id] = asyncio.get_running_loop().create_future()
        if not self._free:
            turn.reason = self._queue.why(applicant, began)
        self._let_in()
        try:
            await place
        except asyncio.CancelledError:
            if not self._queue.leave(applicant.id):  # it was let in at the very moment
                self._queue.corrected(turn.tenant, -turn.expected)
                self._free += 1
                self._let_in()
            raise
        finally:
            self._waiting.pop(applicant.id, None)
        turn.waited = self.now() - began
        self._metrics.waited.labels(workload, turn.reason or "none").observe(turn.waited)

    def leave(self, turn: Turn, seconds: float, done: bool) -> None:
        """A request has left the engine after so many seconds; those of one that was not ``done`` teach nothing."""
        self._queue.corrected(turn.tenant, seconds - turn.expected)
        if done:
            workload = self._queue.known(turn.use.workload)
            known = self._seconds.get(workload, seconds)
            self._seconds[workload] = known + _SMOOTHING * (seconds - known)
        self._free += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._free and (applicant := self._queue.next(self.now())) is not None:
            self._free -= 1
            self._waiting[applicant.id].set_result(None)
