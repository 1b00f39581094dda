"""Fair shares of work between tenants: whoever has had least of it goes next."""

from __future__ import annotations

from collections.abc import Collection


class FairShares:
    """Seconds of work that tenants have had, as start-time fair queueing counts them (Goyal, Vin and Cheng 1996).

    Tenants that wait all the time have the same; one that comes back after a while begins where the others are, so that
    nobody saves up idle time. As in Sheng et al. (Fairness in Serving Large Language Models, 2024) a request counts
    with an estimate when it begins and is corrected when it ends.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._level = 0.0  # what whoever was let in last had had before

    def enters(self, tenant: str) -> None:
        """A tenant of whom nothing waited begins to wait."""
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._level)

    def first(self, waiting: Collection[str]) -> str:
        """Whose turn it is, of those who wait, of whom there is one at least."""
        return min(waiting, key=self._had.__getitem__)

    def behind(self, tenant: str, waiting: Collection[str]) -> bool:
        """Whether another one that waits has had less."""
        return any(self._had[other] < self._had[tenant] for other in waiting)

    def begins(self, tenant: str, seconds: float, waiting: Collection[str]) -> None:
        """Work of a tenant begins, so many seconds by estimate; ``waiting`` is who waits besides."""
        self._level = max(self._level, self._had[tenant])
        self._had[tenant] += seconds
        self._had = {name: had for name, had in self._had.items() if had > self._level or name in waiting}

    def corrected(self, tenant: str, seconds: float) -> None:
        """Work of a tenant took so many seconds more than was estimated, or less if negative."""
        self._had[tenant] = self._had.get(tenant, self._level) + seconds
