"""Ingest: documents -> chunks -> embeddings -> indexes -> chunk KVs. Killed anywhere, the next run continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blendkv.errors import DocumentError, InputError
from blendkv.library import ChunkLibrary
from blendkv.retrieval.collection import Collection, SyncReport
from blendkv.retrieval.embed import Embedder
from blendkv.retrieval.load import load_corpus, source_names
from blendkv.retrieval.split import Splitter
from blendkv.types import TokenIds

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
    library: ChunkLibrary,
    sources: Sequence[str | Path],
    *,
    precompute: Precompute = "all",
    precompute_bytes: int | None = None,
    chunk_tokens: int = 384,
    prune: bool = False,
    progress: IngestProgress | None = None,
) -> IngestReport:
    """Bring collection, indexes and store in line with ``sources``.

    Parameters
    ----------
    collection, embedder, library
        What is searched, what embeds, and who computes and keeps chunk KVs.
    sources
        Files, folders, ``hf:NAME``, ``python-reference``; see `blendkv.retrieval.load.load_corpus`.
    precompute
        ``all``: compute every chunk's KV now; ``lazy``: at first use, beyond what ``precompute_bytes`` allows.
    precompute_bytes
        Upper bound of the KV computed now. None: no bound for ``all``, nothing for ``lazy``.
    chunk_tokens
        Target size of a chunk.
    prune
        Remove documents that the sources no longer hold. Their chunk KVs go too.
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
    before = _token_digests(collection)
    splitter = Splitter(library.engine.tokenizer, chunk_tokens)
    documents = load_corpus(sources, on_skip=skipped.append)
    report = collection.sync(
        documents,
        splitter,
        on_skip=skipped.append,
        prune=prune and not skipped,
        sources=source_names(sources),
        progress=lambda done, total: tell("documents", done, total),
    )
    removed = _drop_stale(library, before, collection) if report.changed or report.removed else 0
    seconds["documents"] = time.perf_counter() - began

    began = time.perf_counter()
    collection.embed_missing(embedder, progress=lambda done, total: tell("embed", done, total))
    seconds["embed"] = time.perf_counter() - began

    computed, tokens, left = 0, 0, 0
    began = time.perf_counter()
    limit = 0 if precompute == "lazy" and precompute_bytes is None else precompute_bytes
    if library.engine.unsupported is None:
        start = (library.counts.computed, library.counts.computed_tokens)
        left = library.precompute(_chunk_ids(collection), limit, lambda done, total: tell("kv", done, total))
        computed, tokens = library.counts.computed - start[0], library.counts.computed_tokens - start[1]
    seconds["kv"] = time.perf_counter() - began
    counts = collection.counts()
    return IngestReport(
        report, tuple(str(e) for e in skipped), counts.chunks, counts.tokens, computed, tokens, left, removed, seconds
    )


def _chunk_ids(collection: Collection) -> list[TokenIds]:
    return [chunk.token_ids for chunk in collection.chunks()]


def _token_digests(collection: Collection) -> dict[bytes, TokenIds]:
    return {chunk.token_ids.tobytes(): chunk.token_ids for chunk in collection.chunks()}


def _drop_stale(library: ChunkLibrary, before: dict[bytes, TokenIds], collection: Collection) -> int:
    """Remove the KV of chunks that no document has any more."""
    after = _token_digests(collection)
    return sum(library.store.remove(library.key(ids)) for name, ids in before.items() if name not in after)
