"""Blocks in the order of a rank that changes: a heap that puts off its work.

Most ranks rise with each use, and most blocks are used several times before they come near the low end. So a rank that
rises is only noted, and the heap learns of it when the block's old place comes to the top; a rank that falls gets a new
place at once. Places that are out of date are struck out when they come to the top, or all together once there are more
of them than blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from blendkv.market.eviction import enough

_SLACK = 16
"""Places out of date that even the smallest heap may have."""


class _Ranked:
    """A block: its bytes, its rank and when that was set, and the rank and time of its place in the heap."""

    __slots__ = ("nbytes", "placed", "rank", "tick")

    def __init__(self, nbytes: int, rank: float, tick: int) -> None:
        self.nbytes = nbytes
        self.rank = rank
        self.tick = tick
        self.placed = (rank, tick)


class Ranking:
    """Keys with bytes, the lowest rank first; of equal ranks, the one that was set first.

    `set` and `drop` take O(log n) or less, amortised; walking over the k lowest O(k log k), whatever n is. The heap has
    at most twice as many places as there are keys, and a few more.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, _Ranked] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._ticks = 0

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def rank(self, key: str) -> float:
        """The rank of a key that is there."""
        return self._blocks[key].rank

    def nbytes(self, key: str) -> int:
        """Bytes of a key that is there."""
        return self._blocks[key].nbytes

    def set(self, key: str, nbytes: int, rank: float) -> None:
        """Add a key, or change its bytes and its rank."""
        self._ticks = tick = self._ticks + 1
        block = self._blocks.get(key)
        if block is None:
            self._blocks[key] = _Ranked(nbytes, rank, tick)
        else:
            block.nbytes, block.rank, block.tick = nbytes, rank, tick
            if rank >= block.placed[0]:
                return
            block.placed = (rank, tick)
        heapq.heappush(self._heap, (rank, tick, key))
        self._bound()

    def drop(self, key: str) -> None:
        """Forget a key that is there."""
        del self._blocks[key]
        self._bound()

    def lowest(self) -> str | None:
        """The key of the lowest rank; None if there are none."""
        self._settle()
        return self._heap[0][2] if self._heap else None

    def walk(self) -> Iterator[tuple[str, int]]:
        """Keys with their bytes in order; nothing may be set or dropped meanwhile."""
        self._settle()
        heap, blocks = self._heap, self._blocks
        # A heap is a tree: what comes next is a child of what has been passed. Where a block has risen since it was
        # placed, its true place is put in among those that wait (index -1: it has no children of its own).
        front = [(*heap[0], 0)] if heap else []
        while front:
            rank, tick, key, index = heapq.heappop(front)
            block = blocks.get(key)
            if block is not None:
                if tick == block.tick:
                    yield key, block.nbytes
                elif (rank, tick) == block.placed:
                    heapq.heappush(front, (block.rank, block.tick, key, -1))
            if index >= 0:
                for child in (2 * index + 1, 2 * index + 2):
                    if child < len(heap):
                        heapq.heappush(front, (*heap[child], child))

    def victims(self, nbytes: int, keep: Container[str]) -> list[str]:
        """The lowest keys outside ``keep`` until ``nbytes`` bytes are freed."""
        return enough(self.walk(), nbytes, keep)

    def _settle(self) -> None:
        """Until the top of the heap is up to date."""
        heap, blocks = self._heap, self._blocks
        while heap:
            rank, tick, key = heap[0]
            block = blocks.get(key)
            if block is None or block.placed != (rank, tick):
                heapq.heappop(heap)
            elif tick != block.tick:
                block.placed = (block.rank, block.tick)
                heapq.heapreplace(heap, (*block.placed, key))
            else:
                break

    def _bound(self) -> None:
        """Place every block anew if places out of date are more than blocks."""
        if len(self._heap) <= 2 * len(self._blocks) + _SLACK:
            return
        self._heap = []
        for key, block in self._blocks.items():
            block.placed = (block.rank, block.tick)
            self._heap.append((*block.placed, key))
        heapq.heapify(self._heap)
