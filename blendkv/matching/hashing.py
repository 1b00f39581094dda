"""Rolling fingerprints: the hash of any run of token ids in O(1), for many runs at once.

With x_i the mixed token ids and B odd, S_i = sum_{j<i} x_j B^j (mod 2^64). The polynomial hash of the run
[a, a + n) (Karp and Rabin 1987) is then (S_{a+n} - S_a) B^{-a}: B has an inverse, so it does not depend on where
the run stands. All of it is vectorised; nothing rolls token by token.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from blendkv.types import TokenIds

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_BASE = 0x9E3779B97F4A7C15  # 5 mod 8: its powers have the longest period there is modulo 2^64
_LENGTH = np.uint64(0xD6E8FEB86659FD93)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(values: Hashes) -> Hashes:
    """Scramble 64-bit values one to one, so that every bit depends on all bits (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def mix_tokens(ids: TokenIds) -> Hashes:
    """A 64-bit value per token id."""
    return mix((ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_BASE))


@lru_cache(maxsize=4)
def _powers(size: int) -> tuple[Hashes, Hashes]:
    """B^i and B^-i for i < ``size``."""
    tables = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        factors = np.full(size, base, dtype=np.uint64)
        factors[0] = 1
        tables.append(np.multiply.accumulate(factors))
    return tables[0], tables[1]


class RunHashes:
    """Hashes of the runs of one sequence of token ids."""

    def __init__(self, ids: TokenIds) -> None:
        powers, self._inverse = _powers(max(1024, 1 << len(ids).bit_length()))
        self._sums = np.zeros(len(ids) + 1, dtype=np.uint64)
        np.cumsum(mix_tokens(ids) * powers[: len(ids)], out=self._sums[1:])

    def of(self, starts: Ints, lengths: Ints) -> Hashes:
        """Hashes of the runs ``[start, start + length)``; equal runs have equal hashes, in every sequence."""
        raw = (self._sums[starts + lengths] - self._sums[starts]) * self._inverse[starts]
        return mix(raw + lengths.astype(np.uint64) * _LENGTH)

    def windows(self, length: int) -> Hashes:
        """Hashes of all runs of ``length`` tokens, in order; empty if there are none."""
        count = max(0, len(self._sums) - length)
        raw = (self._sums[length : length + count] - self._sums[:count]) * self._inverse[:count]
        return mix(raw + np.full(1, length, dtype=np.uint64) * _LENGTH)


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """``start, start + 1, ..., start + length - 1`` for every pair, one after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(total, dtype=np.int64)
