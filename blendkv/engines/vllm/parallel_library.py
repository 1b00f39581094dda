"""The chunk library of tensor-parallel ranks: they look up, compute and give up together; rank 0 stores."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from blendkv.engines.base import ChunkEngine
from blendkv.engines.vllm.parallel import Ranks
from blendkv.library import ChunkLibrary
from blendkv.store.base import ChunkReader
from blendkv.store.codecs import RAW
from blendkv.store.door import Store
from blendkv.store.reports import StoreStat
from blendkv.types import ChunkKV, Prompt, RecipeKind, TokenIds, chunk_key

_log = logging.getLogger(__name__)
_COMPUTED_BYTES = 1 << 28
"""Most KV that a rank keeps of what was computed and not yet seen in the store."""


def library(
    ranks: Ranks,
    engine: ChunkEngine,
    store: Store,
    kind: RecipeKind,
    prefix: TokenIds,
    codec: str,
    tenant: str = "",
) -> ChunkLibrary:
    """The library for a number of ranks: `ChunkLibrary` for one, else `ParallelLibrary`."""
    if ranks.size == 1:
        return ChunkLibrary(engine, store, kind, prefix, codec, tenant)
    return ParallelLibrary(ranks, engine, store, kind, prefix, codec, tenant)


class ParallelLibrary(ChunkLibrary):
    """A `ChunkLibrary` whose engine computes the heads of one rank.

    What it hands out holds this rank's heads and is in host memory, whole: no read is left that could fail on one rank
    in the middle of a blend. A chunk that any rank cannot have from the store is computed by all.
    """

    def __init__(
        self,
        ranks: Ranks,
        engine: ChunkEngine,
        store: Store,
        kind: RecipeKind,
        system_prefix: TokenIds,
        codec: str = RAW,
        tenant: str = "",
    ) -> None:
        super().__init__(engine, store, kind, system_prefix, codec, tenant)
        self._ranks = ranks
        self._at_hand: dict[str, ChunkReader | None] | None = None
        """While a prompt is looked up: what that has found, or computed, by key."""
        self._computed: OrderedDict[str, ChunkKV] = OrderedDict()
        self._computed_bytes = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers and all heads, as they are stored."""
        share = self._ranks.share
        return super().bytes_per_token * share.size // share.replicas

    def readers(self, prompt: Prompt) -> list[ChunkReader | None]:
        """See `ChunkLibrary.readers`; all the prompt's look-ups are agreed on at once."""
        wanted: dict[str, TokenIds] = {}
        for segment in prompt.segments:
            ids = segment.token_ids
            if segment.kind == "chunk":
                wanted[self.key(ids)] = ids
            elif segment.kind == "system":
                wanted[chunk_key(self.fingerprint, self.start, ids)] = ids
        try:
            self._at_hand = dict(zip(wanted, self._fetch(list(wanted.items())), strict=True))
            return super().readers(prompt)
        finally:
            self._at_hand = None

    def _look_up(self, key: str, token_ids: TokenIds) -> ChunkReader | None:
        if self._at_hand is not None and key in self._at_hand:
            return self._at_hand[key]
        return self._fetch([(key, token_ids)])[0]

    def _fetch(self, wanted: Sequence[tuple[str, TokenIds]]) -> list[ChunkReader | None]:
        """Chunk KVs that every rank has from its store, with this rank's heads."""
        found = [self._read(key, ids) for key, ids in wanted]
        everywhere = self._ranks.agree([reader is not None for reader in found])
        return [reader if all_have else None for reader, all_have in zip(found, everywhere, strict=True)]

    def _read(self, key: str, token_ids: TokenIds) -> ChunkReader | None:
        try:
            reader = super()._look_up(key, token_ids)
            if reader is None:  # rank 0 may still be writing what all have computed
                return self._computed.get(key)
            self._forget(key)
            return self._ranks.local(reader)
        except Exception as error:  # on this rank only, perhaps: the others must hear of it, whatever it is
            self.counts.failed_lookups += 1
            if self.counts.failed_lookups == 1:
                _log.warning(
                    "rank %d cannot read the store, all ranks compute (said once): %s", self._ranks.rank, error
                )
            return None

    def _keep(self, kv: ChunkKV) -> None:
        """Gather all heads, and store them where rank 0 is."""
        whole = self._ranks.gather(kv)
        if whole is not None:
            try:
                super()._keep(whole)
            except Exception as error:  # rank 0 alone must not stop here
                self.counts.not_stored += 1
                _log.warning("chunk %s is not stored: %s", kv.key[:12], error)
        if self._at_hand is not None:
            self._at_hand[kv.key] = kv
        self._forget(kv.key)
        self._computed[kv.key] = kv
        self._computed_bytes += kv.nbytes
        while self._computed_bytes > _COMPUTED_BYTES:
            self._forget(next(iter(self._computed)))

    def _forget(self, key: str) -> None:
        kv = self._computed.pop(key, None)
        self._computed_bytes -= 0 if kv is None else kv.nbytes

    def _wanted(self, chunks: Sequence[TokenIds], max_bytes: int | None) -> tuple[list[TokenIds], int]:
        return self._ranks.decide(lambda: super(ParallelLibrary, self)._wanted(chunks, max_bytes))

    def _check_written(self, before: StoreStat) -> None:
        with self._ranks.together():
            super()._check_written(before)

    def _finish_writing(self, before: StoreStat) -> None:
        with self._ranks.together():
            self.store.flush()
        self._check_written(before)
