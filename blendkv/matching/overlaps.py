"""Overlaps resolved: the choice of placements that covers the most tokens of the prompt."""

from __future__ import annotations

import numpy as np

from blendkv.matching.hashing import Ints
from blendkv.matching.lookup import Candidates

_MATCHES_BITS = 24  # matches in one prompt: fewer than 2^24


def choose(candidates: Candidates) -> Ints:
    """Indices of placements, in order of position, without overlaps, that cover the most tokens together.

    Weighted interval scheduling, O(n log n) for n candidates. Of two choices that cover as much, the one with fewer
    and so longer chunks is taken; of candidates for the same positions, the one with the highest rank.
    """
    order = np.lexsort((-candidates.rank, candidates.start, candidates.stop))
    start, stop = candidates.start[order], candidates.stop[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (np.diff(start) != 0) | (np.diff(stop) != 0)
    order, start, stop = order[first], start[first], stop[first]
    if (start[1:] >= stop[:-1]).all():
        return order
    weight = (((stop - start) << _MATCHES_BITS) - 1).tolist()
    before = np.searchsorted(stop, start, side="right").tolist()  # how many end where this one starts, or earlier
    best = [0]
    for w, b in zip(weight, before, strict=True):
        best.append(max(best[-1], best[b] + w))
    taken = []
    at = len(order)
    while at > 0:
        if best[at] == best[at - 1]:
            at -= 1
        else:
            taken.append(at - 1)
            at = before[at - 1]
    return order[taken[::-1]]
