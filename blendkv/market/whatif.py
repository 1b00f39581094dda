"""What more bytes would have saved, from blocks that came back after they had left.

A block that left would still be there if the tier had as many bytes more as have left since: what a tier holds is, but
for ties, what leaves last. So every return of a ghost says from which size on it would have been a hit.
"""

from __future__ import annotations

from math import log2

_OCTAVES = 64


class WhatIf:
    """Seconds that returns of ghosts would have saved, by the bytes that were missing for it."""

    def __init__(self) -> None:
        self._saved = [0.0] * _OCTAVES
        self.left = 0
        """Bytes that have left so far."""
        self.saved = 0.0
        """Seconds that hits have saved so far."""

    def leaves(self, nbytes: int) -> int:
        """A block leaves; return the mark with which `returned` is to be called when it comes back."""
        mark = self.left
        self.left += nbytes
        return mark

    def hit(self, saved: float) -> None:
        """A block was used while it was held, which saved ``saved`` seconds."""
        self.saved += saved

    def returned(self, mark: int, saved: float) -> None:
        """A block that had left at ``mark`` was asked for; having it would have saved ``saved`` seconds."""
        missing = max(1, self.left - mark)
        self._saved[min(_OCTAVES - 1, int(log2(missing)))] += saved

    def more(self, nbytes: int) -> float:
        """Seconds that so many bytes more would have saved so far, interpolated inside an octave."""
        if nbytes <= 0:
            return 0.0
        octave = min(_OCTAVES - 1, int(log2(nbytes)))
        part = (nbytes - 2.0**octave) / 2.0**octave
        return sum(self._saved[:octave]) + part * self._saved[octave]
