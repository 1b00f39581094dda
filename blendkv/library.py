"""From token ids to chunk KV: looked up in the store, or computed alone and stored off the critical path."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blendkv.blend.codec_choice import default_codec
from blendkv.engines.base import ChunkEngine, ModelIdentity, head_dims, kv_bytes_per_token
from blendkv.errors import DamagedChunkError, StoreError, StoreFullError, UnsupportedModelError
from blendkv.kernels import Stored
from blendkv.observe.tracing import span
from blendkv.store.base import ChunkReader, LoadingReader
from blendkv.store.codecs import RAW, check_codec
from blendkv.store.coding import as_stored
from blendkv.store.door import Store
from blendkv.store.prefetch import LayerPrefetcher
from blendkv.store.pressure import Selective
from blendkv.store.reports import StoreStat
from blendkv.types import ChunkKV, Prompt, Recipe, RecipeKind, Segment, TokenIds, as_token_ids, chunk_key

_log = logging.getLogger(__name__)
PASS_TOKENS = 2048
"""Chunk tokens computed in one pass of the model when many are missing."""


class PromptSource:
    """`KVSource` over the readers of a prompt's segments; layers are read ahead by `LayerPrefetcher`."""

    def __init__(self, readers: Sequence[ChunkReader | None], prefetcher: LayerPrefetcher) -> None:
        self.readers = readers
        self.prefetcher = prefetcher

    def layer(self, index: int) -> Sequence[tuple[Stored, Stored] | None]:
        """K and V per segment; None where nothing is stored."""
        found = iter(self.prefetcher.layer(index))
        return [None if r is None else next(found) for r in self.readers]


@dataclass
class LibraryCounts:
    """What a library did: chunks found, computed (missing), tokens computed.

    ``failed_lookups`` and ``not_stored`` count chunks that the store could not look up (computed instead) or take;
    ``not_worth_storing`` those that were computed for one prompt only, because what would have left the store for them
    is worth more.
    """

    hits: int = 0
    computed: int = 0
    computed_tokens: int = 0
    failed_lookups: int = 0
    not_stored: int = 0
    not_worth_storing: int = 0


class Library(ABC):
    """The chunk KVs of one model, one store, one recipe kind and one codec behind one prefix: named, looked up, filled.

    Who computes them is the subclass's business: `ChunkLibrary` for a model in this process.

    Parameters
    ----------
    model, store
        Whose chunk KVs, and who keeps them.
    kind
        ``system``: chunks are computed behind ``system_prefix``; ``bos``: behind the tokenizer's BOS, if it has one.
    system_prefix
        Token ids of the prompt's system segment.
    codec
        How chunk KVs are stored (docs/codecs.md). What stands at position 0 is always raw: it is small, all chunks are
        computed behind it, and every token attends to it.
    tenant
        The tag of whose chunk KVs they are (`blendkv.tenants`); empty: nobody's. Those of others never match.

    Raises
    ------
    InputError
        If there is no such codec.
    """

    def __init__(
        self,
        model: ModelIdentity,
        store: Store,
        kind: RecipeKind,
        system_prefix: TokenIds,
        codec: str = RAW,
        tenant: str = "",
    ) -> None:
        check_codec(codec, ())
        self.store, self.kind = store, kind
        self.fingerprint = model.fingerprint
        self.system_prefix = system_prefix
        bos = model.bos_token_id
        before = system_prefix if kind == "system" else as_token_ids([] if bos is None else [bos])
        self.recipe = Recipe(kind, tuple(int(t) for t in before), model.dtype, codec, tenant)
        self.start = Recipe("system", (), model.dtype, tenant=tenant)
        """The recipe of what stands at position 0: the system prefix, or BOS."""
        self.counts = LibraryCounts()

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, as they are stored."""

    @abstractmethod
    def fill(self, chunks: Sequence[TokenIds]) -> Iterator[int]:
        """Compute and store chunks that are missing; yields the tokens done, step by step."""

    def key(self, token_ids: TokenIds) -> str:
        """The chunk key of a chunk under this recipe."""
        return chunk_key(self.fingerprint, self.recipe, token_ids)

    def has(self, token_ids: TokenIds) -> bool:
        """Whether the store holds the chunk (index only)."""
        return self.store.contains(self.key(token_ids), token_ids)

    def precompute(
        self, chunks: Sequence[TokenIds], max_bytes: int | None, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Compute and store what is missing, in order, as far as ``max_bytes`` of KV and the store's limit allow.

        Returns the number of chunks that were left out for want of budget. ``progress`` gets (tokens done, tokens).

        Raises
        ------
        StoreFullError, StoreError
            As soon as chunk KVs cannot be written; what was written before is kept.
        """
        wanted, left_out = self._wanted(chunks, max_bytes)
        total, done = sum(len(c) for c in wanted), 0
        before = self.store.stat()
        for tokens in self.fill(wanted):
            done += tokens
            self._check_written(before)
            if progress is not None:
                progress(done, total)
        self._finish_writing(before)
        return left_out

    def _finish_writing(self, before: StoreStat) -> None:
        """Wait until all is written; raise if it could not be."""
        self.store.flush()
        self._check_written(before)

    def _wanted(self, chunks: Sequence[TokenIds], max_bytes: int | None) -> tuple[list[TokenIds], int]:
        """The chunks to compute, and how many ``max_bytes``, the store or the quota has no room for."""
        per_token = self.bytes_per_token
        stat = self.store.stat()
        own = stat.quota(self.recipe.tenant)
        limits = [b for b in (max_bytes, stat.tiers[-1].limit, own) if b is not None]
        room = min(limits, default=None)
        wanted: list[TokenIds] = []
        left_out = 0
        for ids in {c.tobytes(): c for c in chunks}.values():
            cost = per_token * len(ids)
            if room is not None and cost > room:
                left_out += 1
                continue
            room = None if room is None else room - cost
            if not self.has(ids):
                wanted.append(ids)
        return wanted, left_out

    def _check_written(self, before: StoreStat) -> None:
        """Raise once chunk KVs cannot be written, or only in place of others: to compute the rest is for nothing."""
        now = self.store.stat()
        if now.background_errors > before.background_errors:
            self.store.flush()
        evicted = now.tiers[-1].evictions.get("full", 0) - before.tiers[-1].evictions.get("full", 0)
        if evicted > 0:
            raise StoreFullError(
                f"the disk is full: {evicted} chunk KVs had to go to make room for others; free some space, or compute "
                "less now (--precompute-bytes, --disk), and run the same command again to go on"
            )


class ChunkLibrary(Library):
    """A `Library` whose chunk KVs are computed by a model in this process.

    Parameters
    ----------
    engine
        Who computes.
    store, kind, system_prefix, codec, tenant
        As for `Library`.

    Raises
    ------
    InputError
        If the codec is unknown, or cannot take the model's heads.
    """

    def __init__(
        self,
        engine: ChunkEngine,
        store: Store,
        kind: RecipeKind,
        system_prefix: TokenIds,
        codec: str = RAW,
        tenant: str = "",
    ) -> None:
        super().__init__(engine, store, kind, system_prefix, codec, tenant)
        self.engine = engine
        if codec != RAW:
            with suppress(UnsupportedModelError):  # no chunk KV will come of it; prompts are prefilled in full
                check_codec(codec, head_dims(engine.runner))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, as they are stored."""
        return kv_bytes_per_token(self.engine.runner, self.recipe.codec)

    def fill(self, chunks: Sequence[TokenIds]) -> Iterator[int]:
        """Compute and store chunks; yields the tokens of each."""
        return (len(kv.token_ids) for kv in self.compute(chunks))

    def _at_start(self, token_ids: TokenIds) -> ChunkReader | None:
        """KV of a run of tokens at position 0, computed and stored when it is missing; None when it is empty."""
        if len(token_ids) == 0:
            return None
        key = chunk_key(self.fingerprint, self.start, token_ids)
        found = self._look_up_all({key: token_ids}).get(key)
        if found is not None:
            return found
        kv = self.engine.collect(self.start, [token_ids], None)[0]
        self._keep(kv)
        return kv

    def _keep(self, kv: ChunkKV) -> None:
        """Store in the background; the answer needs the KV, not its storage."""
        try:
            self.store.put_async(kv)
        except StoreError as error:
            self.counts.not_stored += 1
            if self.counts.not_stored == 1:
                _log.warning("chunk KVs are not stored (said once): %s", error)

    def _prefix(self) -> ChunkKV | None:
        ids = as_token_ids(self.recipe.prefix)
        reader = self._at_start(ids)
        try:
            return None if reader is None else materialise(reader)
        except DamagedChunkError:  # the store has dropped it and logged so; this time it is computed
            reader = self._at_start(ids)
            return None if reader is None else materialise(reader)

    def compute(self, chunks: Sequence[TokenIds], choose: bool = False) -> Iterator[ChunkKV]:
        """Compute chunks alone, several in one pass, and store them in the background; yields them as they are stored.

        With ``choose`` only those are stored that are worth what would have to leave the store for them.
        """
        prefix = self._prefix() if chunks else None
        for batch in batches(chunks, PASS_TOKENS):
            for kv in map(as_stored, self.engine.collect(self.recipe, batch, prefix)):
                self.counts.computed += 1
                self.counts.computed_tokens += len(kv.token_ids)
                if not choose or self._earns(kv):
                    self._keep(kv)
                yield kv

    def _earns(self, kv: ChunkKV) -> bool:
        """Whether a chunk that a prompt needs is worth its bytes in the store, which may have no room for all."""
        tokens = len(kv.token_ids)
        try:
            earns = not isinstance(self.store, Selective) or self.store.earns(
                kv.key, tokens, tokens * self.bytes_per_token, kv.recipe.tenant
            )
        except StoreError:  # it shows, and is counted, when it is stored
            return True
        self.counts.not_worth_storing += not earns
        return earns

    def readers(self, prompt: Prompt) -> list[ChunkReader | None]:
        """A reader per segment: chunks and the system prefix always have one, missing ones are computed first.

        Where the store is full, what is computed here is stored only if it is worth what would leave for it.
        """
        keys = [self._key_of(segment) for segment in prompt.segments]
        wanted = {key: segment.token_ids for key, segment in zip(keys, prompt.segments, strict=True) if key}
        chunks = {key for key, segment in zip(keys, prompt.segments, strict=True) if segment.kind == "chunk"}
        with span("lookup") as told:
            found = self._look_up_all(wanted)
            hits = chunks & found.keys()
            missing = [wanted[key] for key in wanted if key in chunks and key not in hits]
            self.counts.hits += len(hits)
            told.set(
                chunks=len(chunks), hits=len(hits), missing=len(missing),
                tokens=sum(len(wanted[key]) for key in chunks), tiers=sorted({_tier(found[key]) for key in hits}),
            )  # fmt: skip
        if missing:
            with span("compute", chunks=len(missing), tokens=sum(map(len, missing))):
                found.update((kv.key, kv) for kv in self.compute(missing, choose=True))
        return [
            self._at_start(segment.token_ids) if segment.kind == "system" and key not in found else found.get(key)
            for key, segment in zip(keys, prompt.segments, strict=True)
        ]

    def _key_of(self, segment: Segment) -> str:
        """The key of a segment whose KV is stored; empty for one whose KV is not."""
        if segment.kind == "system" and len(segment.token_ids):
            return chunk_key(self.fingerprint, self.start, segment.token_ids)
        return self.key(segment.token_ids) if segment.kind == "chunk" else ""

    def _look_up_all(self, wanted: dict[str, TokenIds]) -> dict[str, ChunkReader]:
        """Readers of what is stored; a store that fails has nothing, because the KV can be computed."""
        try:
            readers = self.store.get_all(list(wanted.items()))
        except StoreError as error:
            if not self.counts.failed_lookups:
                _log.warning("the store fails, chunk KVs are computed instead (said once): %s", error)
            self.counts.failed_lookups += len(wanted)
            return {}
        return {key: reader for key, reader in zip(wanted, readers, strict=True) if reader is not None}

    @contextmanager
    def source(
        self,
        prompt: Prompt,
        through: Callable[[Sequence[ChunkReader | None]], Sequence[ChunkReader | None]] | None = None,
    ) -> Iterator[PromptSource]:
        """Open the readers of a prompt and read their layers ahead while the block runs.

        ``through`` may put others in place of the readers, and None where tokens are to be computed although their KV
        is stored.
        """
        readers: Sequence[ChunkReader | None] = self.readers(prompt)
        if through is not None:
            readers = through(readers)
        stored = [r for r in readers if r is not None]
        with LayerPrefetcher(stored, len(self.engine.runner.layers)) as prefetcher:
            yield PromptSource(readers, prefetcher)


def _tier(reader: ChunkReader) -> str:
    return reader.tier if isinstance(reader, LoadingReader) else "memory"


def materialise(reader: ChunkReader) -> ChunkKV:
    """All layers of a reader as one chunk KV in memory."""
    pairs = [reader.layer(i) for i in range(reader.layers)]
    k, v = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
    return ChunkKV(reader.fingerprint, reader.recipe, reader.token_ids, k, v)


def stored_codec(folder: Path) -> str | None:
    """The codec that a store was ingested with; None for one that does not say so, and where there is none."""
    return _stored(folder)[1]


def store_codec(folder: Path, fingerprint: str) -> str:
    """The codec of the chunk KVs of a store of a model: its own; of a new store, the one chosen for the model, or raw.

    Raises
    ------
    InputError
        If what was chosen for the model cannot be read.
    """
    made_by, own = _stored(folder)
    if own is not None:
        return own
    return default_codec(folder, fingerprint) if made_by is None else RAW


def _stored(folder: Path) -> tuple[str | None, str | None]:
    """Fingerprint of the model that a store was made with, and codec that it was ingested with."""
    from blendkv.retrieval.collection import Collection
    from blendkv.retrieval.database import FILE_NAME

    if not (folder / FILE_NAME).is_file():
        return None, None
    with Collection(folder) as collection:
        made_by, codec = collection.get_meta("fingerprint"), collection.get_meta("codec")
    return None if made_by is None else str(made_by), None if codec is None else str(codec)


def batches(chunks: Sequence[TokenIds], tokens: int) -> Iterator[list[TokenIds]]:
    """Group chunks, in order, so that each group has at most ``tokens`` tokens, or one chunk."""
    group: list[TokenIds] = []
    size = 0
    for chunk in chunks:
        if group and size + len(chunk) > tokens:
            yield group
            group, size = [], 0
        group.append(chunk)
        size += len(chunk)
    if group:
        yield group
