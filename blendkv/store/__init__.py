"""The store: chunk KVs by key, in memory and on disk.

:class:`KVStore` is the door, :class:`LayerPrefetcher` reads ahead of the computation. A new codec goes into
``CODECS``, a new eviction policy into ``POLICIES``.
"""

from blendkv.store.base import ChunkReader, Layer, LoadingReader, Tier, TierStat
from blendkv.store.codecs import CODECS, Codec
from blendkv.store.policy import POLICIES
from blendkv.store.prefetch import LayerPrefetcher
from blendkv.store.reports import ChunkInfo, GcReport, RepairReport, StoreStat, VerifyReport
from blendkv.store.tiered import KVStore

__all__ = [
    "CODECS",
    "POLICIES",
    "ChunkInfo",
    "ChunkReader",
    "Codec",
    "GcReport",
    "KVStore",
    "Layer",
    "LayerPrefetcher",
    "LoadingReader",
    "RepairReport",
    "StoreStat",
    "Tier",
    "TierStat",
    "VerifyReport",
]
