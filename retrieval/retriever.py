"""Retrieval: a question finds its chunks, by meaning, by words, or by both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from blendkv.errors import InputError
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.dense import HNSW_FROM, DenseIndex
from blendkv.retrieval.embed import Embedder
from blendkv.retrieval.fuse import Fused, reciprocal_rank_fusion
from blendkv.retrieval.lexical import LexicalIndex
from blendkv.types import Chunk

Mode = Literal["hybrid", "dense", "lexical"]

_POOL = 50
"""Least number of chunks that each leg hands to the fusion."""


@dataclass(frozen=True)
class RetrievedChunk:
    """A chunk that was found.

    ``score`` is the fused score in mode ``hybrid`` and the leg's own otherwise; ``ranks`` are from 1, by leg.
    """

    chunk: Chunk
    score: float
    ranks: Mapping[str, int] = field(default_factory=dict)


class Retriever(Protocol):
    """Anything that finds chunks for a question."""

    def retrieve(self, query: str, k: int, where: Mapping[str, Any] | None = None) -> list[RetrievedChunk]:
        """Return at most ``k`` chunks, best first."""

    async def aretrieve(self, query: str, k: int, where: Mapping[str, Any] | None = None) -> list[RetrievedChunk]:
        """As ``retrieve``, without blocking the event loop."""


def check_query(query: str, k: int) -> None:
    """Refuse an empty question and a ``k`` below 1.

    Raises
    ------
    InputError
        If either is given.
    """
    if not query.strip():
        raise InputError("the query is empty; ask something")
    if k < 1:
        raise InputError(f"k is {k}; at least 1 is allowed: ask for one chunk or more")


class HybridRetriever:
    """Searches a collection; equal contents and questions give equal answers.

    Indexes are opened at the first question and again whenever the collection has changed. Threads may share it.

    Parameters
    ----------
    collection
        What to search.
    embedder
        Embeds the question; the one that embedded the collection. Not used in mode ``lexical``.
    mode
        ``dense`` (by embedding), ``lexical`` (BM25), or ``hybrid``: both, fused by reciprocal rank.
    hnsw_from
        Number of chunks from which dense search is approximate.

    Raises
    ------
    InputError
        If the mode is unknown, or the collection was embedded by another embedder.
    """

    def __init__(
        self, collection: Collection, embedder: Embedder, mode: Mode = "hybrid", *, hnsw_from: int = HNSW_FROM
    ) -> None:
        if mode not in get_args(Mode):
            raise InputError(f"retrieval mode {mode!r}; allowed: {', '.join(get_args(Mode))}")
        if mode != "lexical":
            collection.check_embedder(embedder)
        self.collection = collection
        self.embedder = embedder
        self.mode = mode
        self._hnsw_from = hnsw_from
        self._lock = threading.Lock()
        self._dense: DenseIndex | None = None
        self._lexical: LexicalIndex | None = None

    def retrieve(self, query: str, k: int, where: Mapping[str, Any] | None = None) -> list[RetrievedChunk]:
        """Return at most ``k`` chunks, best first; of an empty collection none.

        Parameters
        ----------
        query
            The question.
        k
            At least 1.
        where
            Metadata that the chunk or its document must have: scalars, or lists of which one must match.

        Raises
        ------
        InputError
            If the question is empty, ``k`` is below 1, a filter is neither scalar nor list, or no chunk has an
            embedding although the mode needs them.
        """
        check_query(query, k)
        allowed = self.collection.rows_where(where) if where else None
        pool = max(4 * k, _POOL) if self.mode == "hybrid" else k
        legs: dict[str, list[tuple[int, float]]] = {}
        if dense := self._dense_index():
            vector = self.embedder.encode([query], kind="query")[0]
            legs["dense"] = dense.search(vector, pool, allowed)
        if lexical := self._lexical_index():
            legs["lexical"] = lexical.search(query, pool, allowed)
        found = self._ranked(legs)[:k]
        chunks = self.collection.chunks_by_row([item.row for item in found])
        return [RetrievedChunk(chunks[item.row], item.score, item.ranks) for item in found if item.row in chunks]

    async def aretrieve(self, query: str, k: int, where: Mapping[str, Any] | None = None) -> list[RetrievedChunk]:
        """As ``retrieve``, in a thread."""
        return await asyncio.to_thread(self.retrieve, query, k, where)

    def _ranked(self, legs: Mapping[str, list[tuple[int, float]]]) -> list[Fused]:
        if self.mode == "hybrid":
            return reciprocal_rank_fusion({leg: [row for row, _ in hits] for leg, hits in legs.items()})
        return [
            Fused(row, score, {leg: rank})
            for leg, hits in legs.items()
            for rank, (row, score) in enumerate(hits, start=1)
        ]

    def _dense_index(self) -> DenseIndex | None:
        """Return the dense index of the present contents; None if the mode does without or there is nothing in it."""
        if self.mode == "lexical":
            return None
        with self._lock:
            if self._dense is None or self._dense.tag != self.collection.tag:
                self._dense = DenseIndex(self.collection, hnsw_from=self._hnsw_from)
            dense = self._dense
        if not len(dense) and self.collection.counts().chunks:
            raise InputError(
                f"{self.collection.path}: no chunk is embedded yet; call Collection.embed_missing, "
                "or use mode 'lexical'"
            )
        return dense if len(dense) else None

    def _lexical_index(self) -> LexicalIndex | None:
        """Return the lexical index of the present contents; None if the mode does without or there is nothing in it."""
        if self.mode == "dense":
            return None
        with self._lock:
            if self._lexical is None or self._lexical.tag != self.collection.tag:
                self._lexical = LexicalIndex(self.collection)
            lexical = self._lexical
        return lexical if len(lexical) else None
