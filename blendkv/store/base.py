"""The Protocols of the store: what a reader, a tier and an eviction policy must offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, runtime_checkable

from blendkv.store.timing import Latency
from blendkv.types import Recipe, TokenIds

if TYPE_CHECKING:
    import torch

Layer: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""K before RoPE and V of one layer, each ``[tokens, kv_heads, head_dim]`` in the recipe's dtype, on the CPU."""


class Chunk(Protocol):
    """A chunk KV that somebody holds, whatever its form."""

    @property
    def key(self) -> str:
        """The chunk key, 64 hex digits."""

    @property
    def token_ids(self) -> TokenIds:
        """Token ids, int32 ``[tokens]``."""

    @property
    def recipe(self) -> Recipe:
        """How the chunk KV was computed."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that computed it."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V."""


HeldChunk = TypeVar("HeldChunk", bound=Chunk)
"""The form in which a store holds chunks in memory: tensors, or the file's bytes in shared memory."""


@runtime_checkable
class ChunkReader(Chunk, Protocol):
    """A chunk KV that can be read layer by layer; :class:`blendkv.types.ChunkKV` is the trivial one.

    The tensors are shared with the store: read them, never write into them.
    """

    def layer(self, index: int) -> Layer:
        """K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``.

        Raises
        ------
        DamagedChunkError
            If the stored bytes are missing, truncated, altered or unreadable.
        IndexError
            If there is no such layer.
        """


@runtime_checkable
class LoadingReader(ChunkReader, Protocol):
    """A reader whose layers come from a slower place than memory: worth a prefetch thread."""

    @property
    def tier(self) -> str:
        """Name of the tier that they come from."""

    @property
    def bytes_read(self) -> int:
        """Bytes read from that place so far; a layer that is kept in memory is not read again."""

    def readahead(self, index: int) -> None:
        """Start fetching layer ``index`` without waiting for it. Only a hint: it never fails."""


class ClosableReader(LoadingReader, Protocol):
    """A reader that holds something open until it is closed or dropped."""

    def close(self) -> None:
        """Nothing more will be read."""


@dataclass(frozen=True)
class TierStat:
    """What a tier holds and did. ``bytes`` and ``limit`` are in bytes; a ``limit`` of None means no limit.

    ``evictions`` counts by reason: ``limit`` (the byte limit), ``full`` (the device had no space left), ``quota`` (the
    tenant's). ``refused`` counts chunks for which no room could be made, by the same reasons, and those that were not
    worth what would have left for them (``price``). ``damaged`` counts chunks of this tier that were found damaged.
    ``latencies`` are those of its calls by operation: ``get`` (a look-up), ``put``, and ``load`` (one layer read from
    there).
    """

    name: str
    chunks: int
    bytes: int
    limit: int | None
    hits: int = 0
    misses: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    damaged: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    latencies: Mapping[str, Latency] = field(default_factory=dict)


@dataclass(frozen=True)
class IndexEntry:
    """What the index knows of a chunk's content."""

    key: str
    fingerprint: str
    recipe: Recipe
    token_ids: TokenIds


class IndexReader(Protocol):
    """The index of a store as those read it who look for chunks by their content.

    All calls see what every process has committed, and raise `StoreError` if the index cannot be read. With ``tenant``,
    a tag that may be empty, they look at that tenant's chunks only: others cost nothing.
    """

    def version(self) -> int:
        """A number that differs from the last one if any chunk was added, removed, pinned or noted as used since."""

    def count(self, tenant: str | None = None) -> int:
        """Number of chunks."""

    def keys(self, *, tenant: str | None = None) -> set[str]:
        """The keys of all chunks."""

    def changed_since(self, tick: int, tenant: str | None = None) -> list[tuple[str, int, int]]:
        """(key, bytes of the file, tick) of what was added or used after ``tick``, oldest first; ticks start at 1."""

    def entries(self, keys: Sequence[str]) -> list[IndexEntry]:
        """The entries of those of ``keys`` that are there, in no order."""


class Tier(Protocol):
    """What all places that hold chunk KVs have in common. Safe to call from several threads.

    Tiers trust the key; the store compares the token ids, and counts hits and misses.
    """

    name: str

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key`` without touching its KV, or None."""

    def contains(self, key: str) -> bool:
        """Whether there is a chunk under ``key``; touches no KV."""

    def delete(self, key: str) -> bool:
        """Forget ``key``, pinned or not; return whether it was there."""

    def stat(self) -> TierStat:
        """Chunks, bytes, limit and evictions; hits, misses and damage are the store's to add."""
