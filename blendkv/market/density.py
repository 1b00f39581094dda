"""Least hit density: the policy that learns how many hits a byte will bring for the time that it is held."""

from __future__ import annotations

import math
import random
from collections.abc import Container

import numpy as np
from numpy.typing import NDArray

from blendkv.market.base import POLICIES, Item, Use
from blendkv.market.eviction import AdmitsAll, enough

AGES = 4096
"""Ages that are told apart; older ones count as the last."""
REACH = 64
"""Ages that pass in as many uses as there are blocks held: ages are told apart up to AGES / REACH times that."""
CLASSES = 24
"""Classes by the age at the last hit: none yet, 0, then by powers of two up to 2^22 uses and above."""
SAMPLE = 64
"""Blocks drawn for each victim."""
DECAY = 0.9
"""Share of earlier evidence that is kept at each fit, as in the paper."""
FIRST_FIT, LAST_FIT = 1000, 16_000
"""Uses until the first fit, and between two later on; it doubles in between."""

Counts = NDArray[np.float64]


class Densities:
    """Hits and evictions by class and age, and the hit densities that follow (LHD, NSDI 2018, section 4).

    The density at age a is the sum of P(hit at age a + x) over x, divided by that of (x + 1) P(hit or eviction at age
    a + x): expected hits per time that the block is still held. Arrays have shape (CLASSES, AGES), float64.
    """

    def __init__(self) -> None:
        self.shift = 0
        self.hits: Counts = np.zeros((CLASSES, AGES))
        self.evictions: Counts = np.zeros((CLASSES, AGES))
        self._objects = 0.0
        # Until something is known, the younger the better.
        self.by_class: list[list[float]] = [(1.0 / np.arange(1, AGES + 1)).tolist()] * CLASSES

    def age(self, uses: int) -> int:
        """The age of a block that was used last ``uses`` uses ago."""
        return min(uses >> self.shift, AGES - 1)

    def fit(self, objects: int) -> None:
        """Compute the densities from what was counted, let that fade, and suit the step of ages to the blocks held."""
        self._objects = DECAY * self._objects + (1 - DECAY) * objects if self._objects else objects
        self._coarsen(max(0, round(math.log2(max(1.0, self._objects) / REACH))))
        known = self.hits.sum(1) + self.evictions.sum(1) > 0
        if not known.any():
            return
        pooled = self._densities(self.hits.sum(0), self.evictions.sum(0)).tolist()
        self.by_class = [
            self._densities(self.hits[group], self.evictions[group]).tolist() if known[group] else pooled
            for group in range(CLASSES)
        ]
        self.hits *= DECAY
        self.evictions *= DECAY

    @staticmethod
    def _densities(hits: Counts, evictions: Counts) -> Counts:
        """Densities by age, of counts by age."""
        ended = np.cumsum((hits + evictions)[::-1])
        lifetime = np.cumsum(ended)
        found = np.divide(np.cumsum(hits[::-1]), lifetime, out=np.zeros(AGES), where=lifetime > 0)[::-1]
        found[-1] = -1.0  # older than all that is told apart: first to go
        return found

    def _coarsen(self, shift: int) -> None:
        """Let an age be 2^``shift`` uses."""
        for name in ("hits", "evictions"):
            counts: Counts = getattr(self, name)
            for _ in range(self.shift, shift):
                counts = np.pad(counts.reshape(CLASSES, AGES // 2, 2).sum(2), ((0, 0), (0, AGES // 2)))
            for _ in range(shift, self.shift):
                beyond = counts[:, AGES // 2 :].sum(1)
                counts = np.repeat(counts[:, : AGES // 2] / 2, 2, axis=1)
                counts[:, -1] += beyond
            setattr(self, name, counts)
        self.shift = shift


class _Block:
    """A held block: its bytes, its class, the number of its last use, and where it stands in the list to draw from."""

    __slots__ = ("group", "key", "nbytes", "place", "used")

    def __init__(self, key: str, nbytes: int, used: int, place: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.group = 0
        self.used = used
        self.place = place


class LhdPolicy(AdmitsAll):
    """The lowest hit density per byte goes first (Beckmann, Chen and Cidon, NSDI 2018).

    A block's density depends on its age, the uses of any block since its own last one, and its class, the age that it
    had at its last hit. Victims are the lowest of 64 blocks drawn at random each; of all, where there are no more, and
    where a draw finds none that may leave. Of equal densities, what was used longest ago goes first. A class of which
    no block has been used again or evicted yet takes the densities of all classes together. Workload tags are not
    looked at, and hits count alike, whatever they save.

    Parameters
    ----------
    capacity
        Bytes of the tier; of no matter here.
    seed
        Of the draws.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self._densities = Densities()
        self._seed = seed
        self._uses = 0
        self._events = 0
        self._until_fit = self._between_fits = FIRST_FIT
        self._blocks: dict[str, _Block] = {}
        self._order: list[_Block] = []
        self._named: set[str] = set()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        """A block that is new has had no hit; for one that was held this is a hit."""
        if key in self._blocks:
            self._blocks[key].nbytes = max(1, item.nbytes)
            self.touched(key, use, now)
            return
        self._tick()
        block = _Block(key, max(1, item.nbytes), self._uses, len(self._order))
        self._blocks[key] = block
        self._order.append(block)

    def touched(self, key: str, use: Use, now: float) -> None:
        """Count a hit at the block's age."""
        block = self._blocks.get(key)
        if block is None:
            return
        self._tick()
        waited = self._uses - block.used
        self._densities.hits[block.group, self._densities.age(waited)] += 1.0
        block.group = min(1 + waited.bit_length(), CLASSES - 1)
        block.used = self._uses

    def removed(self, key: str, now: float) -> None:
        """Count an eviction at the block's age; one that was deleted is forgotten without."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        self._events += 1
        if key in self._named:
            self._named.discard(key)
            self._densities.evictions[block.group, self._densities.age(self._uses - block.used)] += 1.0
        last = self._order.pop()
        if last is not block:
            self._order[block.place] = last
            last.place = block.place

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        """Keys outside ``keep`` of low density until ``nbytes`` bytes are freed; the same until something happens."""
        chosen: dict[str, None] = {}
        draws = random.Random(self._seed * 1_000_003 + self._events)
        while nbytes > 0 and len(self._order) > SAMPLE:
            block = self._lowest_drawn(draws, chosen, keep)
            if block is None:
                break
            chosen[block.key] = None
            nbytes -= block.nbytes
        if nbytes > 0:
            rest = sorted((self._density(block), block.used, block.key) for block in self._order)
            left = ((key, self._blocks[key].nbytes) for _, _, key in rest if key not in chosen)
            chosen.update(dict.fromkeys(enough(left, nbytes, keep)))
        self._named = set(chosen)
        return list(chosen)

    def _lowest_drawn(self, draws: random.Random, chosen: Container[str], keep: Container[str]) -> _Block | None:
        """The lowest of a sample; None if all of it must stay, or is chosen already."""
        best: _Block | None = None
        lowest = math.inf
        order, size, draw = self._order, len(self._order), draws.random
        shift, by_class, uses, last = self._densities.shift, self._densities.by_class, self._uses, AGES - 1
        for _ in range(SAMPLE):
            block = order[int(draw() * size)]
            age = (uses - block.used) >> shift
            density = by_class[block.group][age if age < last else last] / block.nbytes
            if density > lowest or (density == lowest and best is not None and block.used >= best.used):
                continue
            if block.key not in keep and block.key not in chosen:
                best, lowest = block, density
        return best

    def _density(self, block: _Block) -> float:
        """Hits per byte and age of holding the block from now on."""
        return self._densities.by_class[block.group][self._densities.age(self._uses - block.used)] / block.nbytes

    def _tick(self) -> None:
        self._uses += 1
        self._events += 1
        self._until_fit -= 1
        if self._until_fit == 0:
            self._until_fit = self._between_fits = min(2 * self._between_fits, LAST_FIT)
            self._densities.fit(len(self._order))


POLICIES.add("lhd")(LhdPolicy)
