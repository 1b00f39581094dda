"""Finders by tenant: each looks at its own tenant's chunks only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from blendkv.matching.finder import ChunkFinder
from blendkv.matching.match import Match
from blendkv.types import TokenIds

_KEPT = 64
"""Tenants whose finders are kept; of the others, the next request reads the tenant's part of the index again."""


class TenantFinders:
    """A `ChunkFinder` per tenant, made when its first prompt comes. For one thread.

    ``make`` returns the finder of a tenant's tag. That of ``default`` is there from the start.
    """

    def __init__(self, make: Callable[[str], ChunkFinder], default: str = "") -> None:
        self._make, self._default = make, default
        self._finders: OrderedDict[str, ChunkFinder] = OrderedDict({default: make(default)})
        self._fresh: set[str] = set()

    def refresh(self) -> None:
        """The index may have changed: every finder looks before it answers again, the default one now.

        Raises
        ------
        StoreError
            If the index cannot be read.
        """
        self._fresh.clear()
        self._refresh(self._default)

    def find(self, token_ids: TokenIds, tenant: str = "") -> list[Match]:
        """Matches of a tenant's chunks in a prompt; see `ChunkFinder.find`.

        Raises
        ------
        StoreError
            If the index cannot be read.
        """
        if tenant not in self._finders:
            self._finders[tenant] = self._make(tenant)
            self._forget()
        self._finders.move_to_end(tenant)
        self._refresh(tenant)
        return self._finders[tenant].find(token_ids)

    def _forget(self) -> None:
        """Drop the finder that was longest not asked, if there are too many; never the default one."""
        if len(self._finders) > _KEPT:
            oldest = next(tenant for tenant in self._finders if tenant != self._default)
            del self._finders[oldest]
            self._fresh.discard(oldest)

    def _refresh(self, tenant: str) -> None:
        if tenant not in self._fresh:
            self._finders[tenant].refresh()
            self._fresh.add(tenant)
