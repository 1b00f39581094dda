"""From a prompt to candidates: the placements of known chunks that the hashes vouch for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from blendkv.matching.hashing import Hashes, Ints, RunHashes, mix, ragged
from blendkv.matching.recipes import Allowed
from blendkv.matching.records import EDGE, NO_TOKEN, WINDOW, Records
from blendkv.types import TokenIds

_FILTER_SLOTS = 32  # per chunk: one window in 32 of unknown text passes the filter


class HashedPrompt:
    """A prompt's token ids with what every look-up needs of them."""

    def __init__(self, ids: TokenIds) -> None:
        self.ids = ids
        self.hashes = RunHashes(ids)
        self.windows = self.hashes.windows(WINDOW)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def padded(self) -> npt.NDArray[np.int32]:
        """The ids with ``EDGE`` times no token on either side: position p stands at p + EDGE."""
        return np.pad(self.ids, EDGE, constant_values=NO_TOKEN)


@dataclass(frozen=True)
class Candidates:
    """Columns, int64: prompt positions ``start .. stop - 1`` hold tokens of chunk ``row`` from ``chunk_start`` on.

    ``row`` counts through the chunks of all look-ups. ``rank`` orders candidates for the same positions.
    """

    start: Ints
    stop: Ints
    chunk_start: Ints
    row: Ints
    rank: Ints

    def __len__(self) -> int:
        return len(self.start)

    def take(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Candidates:
        """Some of them."""
        return Candidates(*(getattr(self, f.name)[which] for f in fields(self)))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """(start, stop, chunk_start, row) of each."""
        return zip(*(c.tolist() for c in (self.start, self.stop, self.chunk_start, self.row)), strict=True)

    @classmethod
    def concatenate(cls, parts: Sequence[Candidates]) -> Candidates:
        """All of ``parts``, in order."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))


@dataclass
class PairBudget:
    """Bounds the work on one prompt: an expansion of hash hits into pairs keeps about ``limit`` of them."""

    limit: int
    pairs: int = 0
    dropped: int = 0

    def expand(self, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """(hit, place) for every place in ``[first, last)`` of every hit.

        If those are too many, hits with many places keep an equal share, spread over their range.
        """
        counts = last - first
        total = int(counts.sum())
        taken = np.minimum(counts, _share(counts, self.limit)) if total > self.limit else counts
        hit = np.repeat(np.arange(len(counts)), taken)
        each = ragged(np.zeros(len(counts), dtype=np.int64), taken)
        self.pairs += len(hit)
        self.dropped += total - len(hit)
        return hit, last[hit] - 1 - each * counts[hit] // taken[hit]


def _share(counts: Ints, limit: int) -> int:
    """The largest q, 1 at least, for which the counts, each cut down to q, sum up to ``limit`` or less."""
    ascending = np.sort(counts)
    before = np.cumsum(ascending) - ascending
    share = (limit - before) // np.arange(len(counts), 0, -1)
    return max(1, int(share[np.argmax(share <= ascending)]))


class Lookup:
    """Finds the chunks of ``records`` in prompts. Sorted once, never changed.

    A window of the prompt that is some chunk's anchor says where the chunk's interior would begin; the hash of the
    prompt there, taken over the interior's length, says which chunks fit. Chunks with the same anchor, offset and
    length are one question, so near-duplicates cost no more than one chunk; those with equal interiors are told apart
    by their edges.
    """

    def __init__(self, records: Records) -> None:
        self.records = records
        order = np.lexsort((records.offset, records.tokens, records.anchor))
        anchor, offset, tokens = records.anchor[order], records.offset[order], records.tokens[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(anchor) != 0) | (np.diff(offset) != 0) | (np.diff(tokens) != 0)
        self._anchor = anchor[new]
        self._offset = offset[new].astype(np.int64)
        self._inner_tokens = tokens[new].astype(np.int64) - 2 * EDGE
        inner = _of_recipe(records.inner, records.recipe)
        self._by_inner = np.argsort(inner, kind="stable")
        self._inner = inner[self._by_inner]
        slots = 1 << (_FILTER_SLOTS * len(order)).bit_length()
        self._filter_mask = np.uint64(slots - 1)
        self._filter = np.zeros(slots, dtype=bool)
        self._filter[self._anchor & self._filter_mask] = True

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, records included; the keys are not counted."""
        arrays = (self._anchor, self._offset, self._inner_tokens, self._by_inner, self._inner, self._filter)
        return self.records.nbytes + sum(array.nbytes for array in arrays)

    def search(self, prompt: HashedPrompt, allowed: Allowed, budget: PairBudget, first_row: int = 0) -> Candidates:
        """Every placement of an allowed chunk's interior in the prompt, run on at both ends as far as the edges agree.

        Rows count from ``first_row``. Hashes are believed: the caller compares token ids.
        """
        begin, inner_tokens = self._placed(prompt, budget)
        inner = prompt.hashes.of(begin, inner_tokens)
        # One question per recipe: a chunk stored behind a thousand system prefixes is no thousand candidates.
        asked = _of_recipe(inner[None, :], allowed.number[:, None]).ravel()
        hit, place = budget.expand(*_equal_range(self._inner, asked))
        recipe, spot = np.divmod(hit, max(1, len(begin)))
        row, begin, inner_tokens = self._by_inner[place], begin[spot], inner_tokens[spot]
        may = (self.records.tokens[row] == inner_tokens + 2 * EDGE) & (begin >= allowed.floor[recipe])
        may &= self.records.recipe[row] == allowed.number[recipe]
        row, begin, recipe = row[may], begin[may], recipe[may]
        return self._run_on(prompt, row, begin, allowed.floor[recipe], allowed.preference[recipe], first_row)

    def _run_on(
        self, prompt: HashedPrompt, row: Ints, begin: Ints, floor: Ints, preference: Ints, first_row: int
    ) -> Candidates:
        """Extend interiors at ``begin`` over the edges: no further than they agree, and not below ``floor``."""
        tokens = self.records.tokens[row].astype(np.int64)
        end = begin + tokens - 2 * EDGE
        edge = np.arange(EDGE)
        # Position p is padded[p + EDGE]: the tokens before begin are padded[begin : begin + EDGE].
        before = prompt.padded[begin[:, None] + edge] == self.records.head[row]
        after = prompt.padded[end[:, None] + EDGE + edge] == self.records.tail[row]
        start = np.maximum(begin - _leading(before[:, ::-1]), floor)
        stop = end + _leading(after)
        # Of two for the same positions: the longer system prefix before the chunk, then the fewer tokens left out.
        rank = (preference + 1) * (2 * EDGE + 1) - (tokens - (stop - start))
        return Candidates(start, stop, EDGE - (begin - start), row + first_row, rank)

    def _placed(self, prompt: HashedPrompt, budget: PairBudget) -> tuple[Ints, Ints]:
        """Where interiors would begin by their anchors, and their tokens."""
        position = np.flatnonzero(self._filter[prompt.windows & self._filter_mask])
        hit, shape = budget.expand(*_equal_range(self._anchor, prompt.windows[position]))
        begin, inner_tokens = position[hit] - self._offset[shape], self._inner_tokens[shape]
        fits = (begin >= 0) & (begin + inner_tokens <= len(prompt))
        return begin[fits], inner_tokens[fits]


def _equal_range(table: Hashes, values: Hashes) -> tuple[Ints, Ints]:
    return np.searchsorted(table, values, side="left"), np.searchsorted(table, values, side="right")


def _of_recipe(inner: Hashes, recipe: npt.NDArray[np.integer]) -> Hashes:
    """Hashes of interiors, told apart by the numbers of their recipes."""
    return mix(inner ^ mix(recipe.astype(np.uint64) + np.uint64(1)))


def _leading(equal: npt.NDArray[np.bool_]) -> Ints:
    """Per row, how many of the first entries are true."""
    return np.logical_and.accumulate(equal, axis=1).sum(axis=1)
