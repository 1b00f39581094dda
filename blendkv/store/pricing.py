"""The calls of a store that its memory's policy answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from blendkv.errors import InputError
from blendkv.market.hints import Hint
from blendkv.market.words import check_hint
from blendkv.store.base import HeldChunk
from blendkv.store.memory import MemoryTier
from blendkv.store.reports import MarketReport

MOST_PRICES = 1000
"""Chunks of one price list."""


def check_count(count: int) -> None:
    """Refuse a price list of no length, or one that is too long.

    Raises
    ------
    InputError
        If it is not of 1 to 1,000 chunks.
    """
    if not 0 < count <= MOST_PRICES:
        raise InputError(f"a price list of {count} chunks; 1 to {MOST_PRICES} are allowed")


class Priced(ABC, Generic[HeldChunk]):
    """A store whose memory may have a policy that knows prices."""

    _memory: MemoryTier[HeldChunk]

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `StoreError` if the store is closed."""

    def hint(self, session: str, what: Hint, ttl: float = 0.0) -> bool:
        """Tell the tiers what a session says of itself; return whether a policy listens.

        Parameters
        ----------
        session
            Its id, 1 to 64 letters, digits and ``_.:@/+-``.
        what
            ``tool_started``: it comes back within ``ttl`` seconds; ``tool_finished``; ``session_ended``.
        ttl
            Seconds, up to a day; only ``tool_started`` has any.

        Raises
        ------
        InputError
            If the hint is none.
        StoreError
            If the store is closed.
        """
        self._check_open()
        check_hint(session, what, ttl)
        return self._memory.hint(session, what, float(ttl))

    def market(self, count: int = 20) -> MarketReport:
        """The ``count`` chunks that would leave memory first, and what more memory would have saved.

        Raises
        ------
        InputError
            If the memory's policy keeps no prices, or ``count`` is not 1 to 1,000.
        StoreError
            If the store is closed.
        """
        self._check_open()
        check_count(count)
        report = self._memory.market(count)
        if report is None:
            raise InputError(
                "the policy of the store's memory keeps no prices; choose market: blendkv daemon --policy market"
            )
        return report
