"""What a tier's policy knows of chunks that the tier does not hold, for the tier behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from blendkv.market.base import Item, Use


class Lot(NamedTuple):
    """A block to be appraised.

    Attributes
    ----------
    key, item
        Which one, and what a hit saves.
    age
        Seconds since its last use, as far as the tier behind knows: counts if the policy does not know the block.
    """

    key: str
    item: Item
    age: float


@runtime_checkable
class Appraiser(Protocol):
    """A policy that remembers what has left its tier, or has never been in it, and can price it."""

    def appraise(self, lots: Sequence[Lot], now: float) -> list[float]:
        """Prices in seconds saved per byte and second of holding, in the order of ``lots``, held or not."""

    def seen(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` was used, and the tier has no room for it."""
