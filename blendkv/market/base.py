"""The words of the market: what is held, who uses it, and what a policy must offer."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

from blendkv.registry import Registry

UNKNOWN = "unknown"
"""The workload class of a use that nobody has tagged."""
LONGEST_WORD = 64
"""Characters of a workload class, or of a session's id."""
USUAL = "market"
"""Name of the policy of a store of which nothing else is said."""


class Item(NamedTuple):
    """What a policy is told of a block (a chunk KV, or one block of a prefix).

    Attributes
    ----------
    nbytes
        Bytes that it holds in this tier.
    saved
        Seconds that one hit saves: those of recomputing the block less those of loading it from this tier.
    after
        Key of the block without which this one is of no use: the one before it in a prefix. Empty for chunk KVs.
    """

    nbytes: int
    saved: float
    after: str = ""


class Use(NamedTuple):
    """Who uses a block.

    Attributes
    ----------
    workload
        Class of the request: ``agent``, ``chat``, ``rag``, ``single``, or one of the user's own.
    session
        What ties the turns of one conversation together; empty where there is none.
    """

    workload: str = UNKNOWN
    session: str = ""


NOBODY = Use()


class EvictionPolicy(Protocol):
    """Which blocks of a tier leave first. Not safe to use from several threads: the tier holds a lock.

    ``now`` is in seconds of a clock that never goes back. A policy that decides by chance is seeded.
    """

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` is held from now on, made or brought by ``use``; a known key has a new size from here on."""

    def touched(self, key: str, use: Use, now: float) -> None:
        """``key`` was used; one that is not held is ignored."""

    def removed(self, key: str, now: float) -> None:
        """``key`` is not held any more, evicted or deleted; one that is not held is ignored."""

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """Keys outside ``keep`` that shall leave, the first to go first, until ``nbytes`` bytes are freed.

        Fewer if there are no more. Nothing is forgotten by this call: what leaves is told by `removed`.
        """

    def admits(self, key: str, item: Item, use: Use, leaving: Sequence[str], now: float) -> bool:
        """Whether a newcomer is worth more than what would leave for it, as `victims` named it."""


Maker = Callable[[int], EvictionPolicy]
"""Makes the policy of a tier, given the bytes that the tier may hold."""

POLICIES: Registry[Maker] = Registry("eviction policy")
"""Makers by name."""
