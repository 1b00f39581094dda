"""Random chunks for remote tiers, and what the tests of those share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from blendkv.store.guard import GuardedTier, Limits

PATIENT = Limits(deadline_s=60, put_s=60)
"""For what is no question of time."""
Opener = Callable[..., GuardedTier]


@dataclass(frozen=True)
class StoredChunk:
    """A chunk as a remote tier sees it: bytes. What they mean is not its business."""

    key: str
    head: bytes
    layers: tuple[bytes, ...]

    def put(self, tier: GuardedTier) -> bool:
        """Store it."""
        return tier.put(self.key, memoryview(self.head), [memoryview(layer) for layer in self.layers])


def chunk(rng: random.Random, *, layers: int = 3, size: int = 5000, key: str | None = None) -> StoredChunk:
    """A chunk; half of every layer is noise and half is one value, so that Zstandard has something to do."""
    key = key or f"{rng.getrandbits(256):064x}"
    bodies = tuple(rng.randbytes(size // 2) + bytes([index % 256]) * (size - size // 2) for index in range(layers))
    return StoredChunk(key, rng.randbytes(1000), bodies)


def read_all(tier: GuardedTier, key: str, step: int = 1) -> StoredChunk | None:
    """Read a whole chunk, ``step`` layers at a time."""
    head = tier.head(key)
    if head is None:
        return None
    places = [bytearray(size) for size in head.layers]
    for first in range(0, len(places), step):
        tier.fetch(head, first, [memoryview(place) for place in places[first : first + step]])
    return StoredChunk(key, bytes(head.data), tuple(bytes(place) for place in places))
