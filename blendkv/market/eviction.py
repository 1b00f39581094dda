"""What the eviction policies share: naming victims until enough is freed, and letting every newcomer in.

`EvictionPolicy.removed` is told of evictions and deletions alike. A policy whose rule needs the difference takes for an
eviction what its last call of ``victims`` has named, and for a deletion all else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from blendkv.market.base import Item, Use


class AdmitsAll:
    """Base of the policies that have no rule of admission."""

    def admits(self, key: str, item: Item, use: Use, leaving: Sequence[str], now: float) -> bool:
        """Always."""
        return True


def enough(blocks: Iterable[tuple[str, int]], nbytes: int, keep: Container[str]) -> list[str]:
    """The first keys outside ``keep`` that hold ``nbytes`` bytes together, or all of them if they hold less.

    Parameters
    ----------
    blocks
        Keys and their bytes, the first to go first; not read further than needed.
    nbytes
        Bytes to free; none are named for 0 or less.
    keep
        Keys that must stay.
    """
    chosen: list[str] = []
    if nbytes <= 0:
        return chosen
    freed = 0
    for key, size in blocks:
        if key not in keep:
            chosen.append(key)
            freed += size
            if freed >= nbytes:
                break
    return chosen
