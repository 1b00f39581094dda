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
from blendkv.types import ChunkKV, RecipeKind, TokenIds

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
        self._computed: OrderedDict[str, ChunkKV] = OrderedDict()
        self._computed_bytes = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers and all heads, as they are stored."""
        share = self._ranks.share
        return super().bytes_per_token * share.size // share.replicas

    def _look_up_all(self, wanted: dict[str, TokenIds]) -> dict[str, ChunkReader]:
        """Chunk KVs that every rank has, with this rank's heads: all of a prompt are agreed on at once."""
        found = self._own(wanted)
        everywhere = self._ranks.agree([key in found for key in wanted])
        return {key: found[key] for key, all_have in zip(wanted, everywhere, strict=True) if all_have}

    def _own(self, wanted: dict[str, TokenIds]) -> dict[str, ChunkReader]:
        """What this rank has, from its store or because all have computed it and rank 0 may still be writing it."""
        found: dict[str, ChunkReader] = {}
        try:
            stored = super()._look_up_all(wanted)
        except Exception as error:
            self._unreadable(error)
            stored = {}
        for key in wanted:
            if key not in stored:
                if key in self._computed:
                    found[key] = self._computed[key]
                continue
            try:
                found[key] = self._ranks.local(stored[key])
            except Exception as error:
                self._unreadable(error)
            else:
                self._forget(key)
        return found

    def _unreadable(self, error: Exception) -> None:
        """On this rank only, perhaps: the others must hear of it, whatever it is."""
        self.counts.failed_lookups += 1
        if self.counts.failed_lookups == 1:
            _log.warning("rank %d cannot read the store, all ranks compute (said once): %s", self._ranks.rank, error)

    def _earns(self, kv: ChunkKV) -> bool:
        """As rank 0 has it: each has a store of its own, and what is kept all gather together."""
        return self._ranks.decide(lambda: super(ParallelLibrary, self)._earns(kv))

    def _keep(self, kv: ChunkKV) -> None:
        """Gather all heads, and store them where rank 0 is."""
        whole = self._ranks.gather(kv)
        if whole is not None:
            try:
                super()._keep(whole)
            except Exception as error:  # rank 0 alone must not stop here
                self.counts.not_stored += 1
                _log.warning("chunk %s is not stored: %s", kv.key[:12], error)
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
