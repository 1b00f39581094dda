"""The finder: what the store's index holds, known by hashes, and searched for in prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from blendkv.matching.lookup import Candidates, HashedPrompt, Lookup, PairBudget
from blendkv.matching.match import Match
from blendkv.matching.overlaps import choose
from blendkv.matching.recipes import RecipeBook
from blendkv.matching.records import MIN_TOKENS, Records, concatenate, records_of
from blendkv.store.base import IndexEntry, IndexReader
from blendkv.store.door import Store
from blendkv.types import TokenIds, as_token_ids

PAIRS_PER_TOKEN, PAIRS = 2, 4096
"""Pairs of (place in the prompt, chunks) that one expansion may look at: so many per token, and so many besides."""
_COMPARED_PER_TOKEN = 256  # after a hash collision: bound on the token ids compared, per token of the prompt
_ATTEMPTS = 3  # choices that fail to verify before every candidate is compared
_RECENT = 2048  # chunks that are sorted anew with every addition; beyond, they join the others
_BATCH = 256  # chunks hashed at once
_SWEEP_SHARE = 16  # removed chunks are dropped once they are one in 16

_log = logging.getLogger(__name__)


@dataclass
class FinderCounts:
    """What a finder did: hash pairs examined, and those left out by the bound.

    ``gone`` counts chunks that were found and had left the store, ``collisions`` placements that the hashes vouched for
    and the token ids did not.
    """

    pairs: int = 0
    pairs_dropped: int = 0
    gone: int = 0
    collisions: int = 0


class ChunkFinder:
    """Finds stored chunks in token ids. For one thread.

    Which chunk KVs may match: those of this model, dtype and codec that were computed behind the model's BOS
    (recipe kind ``bos``), or behind a system prefix with which the prompt begins. Chunks shorter than ``MIN_TOKENS``
    are not looked for, nor are chunks that are not on disk yet.

    A chunk is found wherever the prompt holds it without at most ``EDGE`` tokens at either end; the match
    is the longest common run there. Hashes find, token ids decide: every match was compared with the index.
    It is linear in the prompt; near-duplicate or periodic text may reach the bound on pairs, and matches are then
    missed, counted in ``counts.pairs_dropped``.

    Parameters
    ----------
    store
        Its index is read; its KV is not touched.
    fingerprint, dtype, bos_token_id, codec
        Of the engine: fingerprint of the model, dtype and codec of the chunks' recipes, BOS or None.
    tenant
        The tag of whose chunks are looked for. Others' are not even read: they cost neither time nor pairs.
    """

    def __init__(
        self,
        store: Store,
        fingerprint: str,
        dtype: str,
        bos_token_id: int | None,
        codec: str = "raw",
        tenant: str = "",
    ) -> None:
        self._store, self._tenant = store, tenant
        self._fingerprint, self._dtype, self._codec, self._bos = fingerprint, dtype, codec, bos_token_id
        self._recipes = self._new_book()
        self._main: Lookup | None = None
        self._recent: Lookup | None = None
        self._seen: set[str] = set()  # keys of the index, those that never match included
        self._version: int | None = None
        self._tick = 0
        self.counts = FinderCounts()

    def __len__(self) -> int:
        """Chunks that can be found; some may have left the store already."""
        return sum(len(lookup.records) for lookup in self._lookups)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays kept; the keys come beside them."""
        return sum(lookup.nbytes for lookup in self._lookups)

    def refresh(self) -> None:
        """Take in what any process has added to the index or removed from it since the last call.

        Costs one pragma if nothing was written. The first call reads the whole index.

        Raises
        ------
        StoreError
            If the index cannot be read; the next call makes up for it.
        """
        index = self._store.index
        if index is None:
            return
        version = index.version()
        if version == self._version:
            return
        changed = index.changed_since(self._tick, self._tenant)
        added = [key for key, _, _ in changed if key not in self._seen]
        there: set[str] = set()
        parts: list[Records] = []
        for first in range(0, len(added), _BATCH):
            entries = index.entries(added[first : first + _BATCH])
            there.update(entry.key for entry in entries)
            parts += self._hashed(entries)
        if parts:
            self._add(concatenate(parts))
        self._seen |= there
        if changed:
            self._tick = changed[-1][2]
        if (len(self._seen) - index.count(self._tenant)) * _SWEEP_SHARE > len(self._seen):
            self._sweep(index)
        self._version = version

    def find(self, token_ids: Sequence[int] | TokenIds) -> list[Match]:
        """Matches in a prompt, in order and without overlaps, chosen to cover the most tokens.

        If the prompt begins with the prefix of a known ``system`` recipe and the store has the KV of that prefix, the
        first match has kind ``system`` and covers it; the longest such prefix counts.

        Raises
        ------
        StoreError
            If the index cannot be read.
        """
        index = self._store.index
        if index is None:
            return []
        prompt = HashedPrompt(as_token_ids(token_ids))
        system = self._system(prompt, index)
        allowed = self._recipes.allowed(prompt.ids, prompt.hashes).after(system[0].stop if system else 0)
        budget = PairBudget(PAIRS + PAIRS_PER_TOKEN * len(prompt))
        parts, rows = [], 0
        for lookup in self._lookups:
            parts.append(lookup.search(prompt, allowed, budget, rows))
            rows += len(lookup.records)
        self._count(budget)
        return system + (self._verified(prompt, Candidates.concatenate(parts), index) if parts else [])

    def _verified(self, prompt: HashedPrompt, candidates: Candidates, index: IndexReader) -> list[Match]:
        """The best choice of candidates that the token ids confirm.

        Only what was chosen is compared, so the comparisons are linear in the prompt. Candidates that fail are struck
        out and the choice is made again.
        """
        for _ in range(_ATTEMPTS):
            choice = choose(candidates)
            chosen = candidates.take(choice)
            verdict = self._compare(prompt, chosen, index)
            if verdict.confirmed.all():
                return self._matches(chosen, verdict)
            gone = [row for row in chosen.row.tolist() if row not in verdict.entries]
            possible = ~np.isin(candidates.row, gone)
            possible[choice[~verdict.confirmed]] = False
            candidates = candidates.take(possible)
        # Hashes that collide again and again: compare all there is, within a bound.
        within = np.cumsum(candidates.stop - candidates.start) <= _COMPARED_PER_TOKEN * len(prompt)
        candidates = candidates.take(within)
        verdict = self._compare(prompt, candidates, index)
        candidates = candidates.take(verdict.confirmed)
        return self._matches(candidates.take(choose(candidates)), verdict)

    def _compare(self, prompt: HashedPrompt, candidates: Candidates, index: IndexReader) -> _Verdict:
        """Compare candidates with the token ids in the index; count those that are gone or differ."""
        keys = {row: self._key(row) for row in np.unique(candidates.row).tolist()}
        found = {entry.key: entry for entry in index.entries(list(keys.values()))}
        entries = {row: found[key] for row, key in keys.items() if key in found}
        text = prompt.ids.tobytes()
        size = prompt.ids.itemsize
        confirmed = np.zeros(len(candidates), dtype=bool)
        for i, (start, stop, first, row) in enumerate(candidates.rows()):
            if row in entries:
                ids = entries[row].token_ids[first : first + stop - start]
                confirmed[i] = ids.tobytes() == text[start * size : stop * size]
                self.counts.collisions += not confirmed[i]
        self.counts.gone += len(keys) - len(entries)
        return _Verdict(confirmed, entries)

    def _matches(self, chosen: Candidates, verdict: _Verdict) -> list[Match]:
        matches = []
        for start, stop, first, row in chosen.rows():
            entry = verdict.entries[row]
            matches.append(Match("chunk", start, stop, entry.key, first, entry.recipe, entry.token_ids))
        return matches

    def _system(self, prompt: HashedPrompt, index: IndexReader) -> list[Match]:
        """The KV of the longest known system prefix with which the prompt begins, if the store has it."""
        for key, ids in self._recipes.starts(prompt.ids, prompt.hashes):
            if key in self._seen and any(np.array_equal(e.token_ids, ids) for e in index.entries([key])):
                return [Match("system", 0, len(ids), key, 0, self._recipes.start, ids)]
        return []

    @property
    def _lookups(self) -> list[Lookup]:
        return [lookup for lookup in (self._main, self._recent) if lookup is not None]

    def _key(self, row: int) -> str:
        for lookup in self._lookups:
            if row < len(lookup.records):
                return lookup.records.keys[row]
            row -= len(lookup.records)
        raise IndexError(row)

    def _new_book(self) -> RecipeBook:
        return RecipeBook(self._fingerprint, self._dtype, self._codec, self._bos, self._tenant)

    def _hashed(self, entries: Sequence[IndexEntry]) -> list[Records]:
        """Records of those entries that may match; at most one batch."""
        keys, recipes, chunks = [], [], []
        for entry in entries:
            if entry.fingerprint != self._fingerprint:
                continue
            number = self._recipes.number(entry.recipe)
            if number is not None and len(entry.token_ids) >= MIN_TOKENS:
                keys.append(entry.key)
                recipes.append(number)
                chunks.append(entry.token_ids)
        return [records_of(keys, recipes, chunks)] if keys else []

    def _add(self, records: Records) -> None:
        """Sort new chunks in: a few among the recent ones, many among all."""
        recent = [records] if self._recent is None else [self._recent.records, records]
        if sum(len(part) for part in recent) <= _RECENT:
            self._recent = Lookup(concatenate(recent))
            return
        main = [] if self._main is None else [self._main.records]
        self._main, self._recent = Lookup(concatenate([*main, *recent])), None

    def _sweep(self, index: IndexReader) -> None:
        """Drop what is no longer in the index, and recipes that no chunk has any more."""
        self._seen &= index.keys(tenant=self._tenant)
        records = [lookup.records for lookup in self._lookups]
        book = self._new_book()
        self._main = self._recent = None
        if records:
            everything = concatenate(records)
            left = everything.take(np.array([row for row, key in enumerate(everything.keys) if key in self._seen], int))
            numbers = {old: book.number(self._recipes.recipes[old]) for old in np.unique(left.recipe).tolist()}
            if len(left):
                recipe = np.array([numbers[old] for old in left.recipe.tolist()], dtype=np.int32)
                self._main = Lookup(replace(left, recipe=recipe))
        self._recipes = book

    def _count(self, budget: PairBudget) -> None:
        self.counts.pairs += budget.pairs
        if budget.dropped and not self.counts.pairs_dropped:
            _log.warning(
                "a prompt has more places to look at than %d: chunks in it may be missed (said once)", budget.limit
            )
        self.counts.pairs_dropped += budget.dropped


@dataclass(frozen=True)
class _Verdict:
    """Which candidates the index confirms, and what it says of their chunks, by row."""

    confirmed: npt.NDArray[np.bool_]
    entries: dict[int, IndexEntry]
