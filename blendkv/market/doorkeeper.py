"""The door's admission queue (`blendkv.market.admission`) as the gatekeeper of a simulated server."""

from __future__ import annotations

from blendkv.market.admission import AdmissionQueue, AdmissionSettings, Applicant
from blendkv.market.queueing import Line, Waiting
from blendkv.market.replay import Cache


class Doorkeeper:
    """Lets the admission queue decide, as the server's door does; costs are those at the time of arrival."""

    def __init__(self, settings: AdmissionSettings | None = None) -> None:
        self._queue = AdmissionQueue(settings)

    def admit(self, newcomer: Waiting, line: Line, now: float, cache: Cache) -> float | None:
        """Offer the request to the queue."""
        number, request, arrived = newcomer
        cost = cache.peek(request).seconds
        refusal = self._queue.offer(
            Applicant(str(number), request.use.workload, "", arrived, cost, 0.0, request.use.session)
        )
        return None if refusal is None else float(refusal.retry_after)

    def order(self, line: Line, now: float, cache: Cache) -> int:
        """Whom the queue lets go next."""
        chosen = self._queue.next(now)
        assert chosen is not None, "all who wait were offered to the queue"
        return int(chosen.id)
