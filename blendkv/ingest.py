"""Ingest: documents -> chunks -> embeddings -> indexes -> chunk KVs. Killed anywhere, the next run continues."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from blendkv.engines.base import Engine
from blendkv.errors import DocumentError, InputError
from blendkv.library import Library
from blendkv.retrieval.collection import Collection, SyncReport
from blendkv.retrieval.embed import Embedder
from blendkv.retrieval.load import MAX_DOCUMENT_BYTES, load_corpus, source_names
from blendkv.retrieval.split import Splitter
from blendkv.types import Document, TokenIds, chunk_key

_log = logging.getLogger(__name__)
_SYNCING = "syncing"
"""Set in the collection while documents change: after a crash, KV of chunks that are gone may be left."""

Precompute = Literal["all", "lazy"]
IngestProgress = Callable[[str, int, int | None], None]
"""Called with the stage (``documents``, ``embed``, ``kv``: tokens), what is done and the total if known."""


@dataclass(frozen=True)
class IngestReport:
    """What an ingest did. ``skipped`` holds one line per document that could not be read; seconds are by stage."""

    documents: SyncReport
    skipped: tuple[str, ...]
    chunks: int
    tokens: int
    kv_computed: int
    kv_tokens: int
    kv_left_for_first_use: int
    kv_removed: int
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def kv_tokens_per_second(self) -> float | None:
        """Rate of computing and storing chunk KV; None when none was computed."""
        return self.kv_tokens / self.seconds["kv"] if self.kv_tokens and self.seconds.get("kv") else None


def ingest(
    collection: Collection,
    embedder: Embedder,
    engine: Engine,
    library: Library,
    sources: Sequence[str | Path],
    *,
    precompute: Precompute = "all",
    precompute_bytes: int | None = None,
    chunk_tokens: int = 384,
    prune: bool = False,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    progress: IngestProgress | None = None,
) -> IngestReport:
    """Bring collection, indexes and store in line with ``sources``.

    Parameters
    ----------
    collection, embedder, engine, library
        What is searched, what embeds, whose tokenizer splits, and who computes and keeps chunk KVs.
    sources
        Files, folders, ``hf:NAME``, ``python-reference``; see `blendkv.retrieval.load.load_corpus`.
    precompute
        ``all``: compute every chunk's KV now; ``lazy``: at first use, beyond what ``precompute_bytes`` allows; then a
        full store keeps what the policy finds worth more than what would leave for it (docs/market.md).
    precompute_bytes
        Upper bound of the KV computed now. None: no bound for ``all``, nothing for ``lazy``.
    chunk_tokens
        Target size of a chunk.
    prune
        Remove documents that the sources no longer hold, and their chunk KVs; nothing, if a document could not be read.
    max_document_bytes
        Larger files, and rows of JSONL and CSV files, are refused from their size.
    progress
        See `IngestProgress`.

    Raises
    ------
    InputError, StoreFullError
        If an argument cannot be used, or the disk is full; what was done before is kept.
    """
    if precompute not in ("all", "lazy"):
        raise InputError(f"unknown precompute {precompute!r}; allowed: all, lazy")
    tell = progress or (lambda stage, done, total: None)
    seconds: dict[str, float] = {}
    skipped: list[DocumentError] = []

    began = time.perf_counter()
    interrupted = collection.get_meta(_SYNCING, False)
    collection.set_meta(_SYNCING, True)
    documents = load_corpus(sources, on_skip=skipped.append, max_document_bytes=max_document_bytes)
    splitter = Splitter(engine.tokenizer, chunk_tokens)
    report = _sync(collection, splitter, documents, source_names(sources) if prune else None, skipped, tell)
    removed = _drop_stale(library, collection) if interrupted or report.changed or report.removed else 0
    collection.set_meta(_SYNCING, False)
    seconds["documents"] = time.perf_counter() - began

    began = time.perf_counter()
    collection.embed_missing(embedder, progress=lambda done, total: tell("embed", done, total))
    seconds["embed"] = time.perf_counter() - began

    computed, tokens, left = 0, 0, 0
    began = time.perf_counter()
    limit = 0 if precompute == "lazy" and precompute_bytes is None else precompute_bytes
    if engine.unsupported is None:
        start = (library.counts.computed, library.counts.computed_tokens)
        left = library.precompute(_chunk_ids(collection), limit, lambda done, total: tell("kv", done, total))
        computed, tokens = library.counts.computed - start[0], library.counts.computed_tokens - start[1]
    seconds["kv"] = time.perf_counter() - began
    counts = collection.counts()
    return IngestReport(
        report, tuple(str(e) for e in skipped), counts.chunks, counts.tokens, computed, tokens, left, removed, seconds
    )


def _sync(
    collection: Collection,
    splitter: Splitter,
    documents: Iterator[Document],
    pruned: Sequence[str] | None,
    skipped: list[DocumentError],
    tell: IngestProgress,
) -> SyncReport:
    """Bring the collection in line with the documents; what cannot be read is added to ``skipped``.

    ``pruned`` names the sources of which documents that did not come are removed; None removes nothing.
    """
    seen: set[str] = set()

    def noted() -> Iterator[Document]:
        for document in documents:
            seen.add(document.id)
            yield document

    report = collection.sync(
        noted(), splitter, on_skip=skipped.append, progress=lambda done, total: tell("documents", done, total)
    )
    if pruned is None:
        return report
    if skipped:  # one of them may be a document that is stored and only cannot be read today
        _log.warning("nothing was pruned, because %d documents could not be read", len(skipped))
        return report
    stale = [d for d in collection.document_ids() if d not in seen and _is_of(d, pruned)]
    for document_id in stale:
        collection.remove_document(document_id)
    return replace(report, removed=len(stale))


def _is_of(document_id: str, names: Sequence[str]) -> bool:
    """Whether a document's id begins with a source's name, as `load_corpus` makes them."""
    return any(document_id == name or document_id.startswith((f"{name}/", f"{name}:")) for name in names)


def _chunk_ids(collection: Collection) -> list[TokenIds]:
    return [chunk.token_ids for chunk in collection.chunks()]


def _drop_stale(library: Library, collection: Collection) -> int:
    """Remove this model's KV of chunks that no document has (any more), whatever its recipe."""
    made_by = library.fingerprint
    rows = [row for row in library.store.ls() if row.fingerprint == made_by and row.recipe != library.start]
    chunks = _chunk_ids(collection)
    kept = {chunk_key(made_by, recipe, ids) for recipe in {row.recipe for row in rows} for ids in chunks}
    return sum(library.store.remove(row.key) for row in rows if row.key not in kept)
