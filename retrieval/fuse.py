"""Putting ranked lists together: reciprocal rank fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fused:
    """An item's fused score and its rank, from 1, in each list that holds it."""

    row: int
    score: float
    ranks: Mapping[str, int] = field(default_factory=dict)


def reciprocal_rank_fusion(rankings: Mapping[str, Sequence[int]], k: int = 60) -> list[Fused]:
    """Fuse ranked lists (Cormack, Clarke and Buettcher, 2009).

    ``score(d) = sum over lists of 1 / (k + rank of d in the list)``, ranks from 1; a list without ``d`` adds nothing.

    Parameters
    ----------
    rankings
        Lists of different items, best first, by name.
    k
        Damps the weight of the first ranks.

    Returns
    -------
    list of Fused
        Best first; of equal scores the one met first, list by list, comes first.
    """
    ranks: dict[int, dict[str, int]] = {}
    for name, rows in rankings.items():
        for rank, row in enumerate(rows, start=1):
            ranks.setdefault(row, {})[name] = rank
    fused = [Fused(row, sum(1 / (k + rank) for rank in found.values()), found) for row, found in ranks.items()]
    return sorted(fused, key=lambda item: -item.score)
