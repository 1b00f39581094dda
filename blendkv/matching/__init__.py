"""Matching by content: stored chunks found in a prompt's token ids, at any offset, without boundaries given.

:class:`ChunkFinder` keeps hashes of what the store's index holds and answers with :class:`Match` objects, each compared
token id by token id. :class:`SlicedReader` reads the part of a chunk KV that a match covers.
"""

from blendkv.matching.finder import ChunkFinder, FinderCounts
from blendkv.matching.match import Match
from blendkv.matching.records import EDGE, MIN_TOKENS
from blendkv.matching.sliced import SlicedReader
from blendkv.matching.tenants import TenantFinders

__all__ = ["EDGE", "MIN_TOKENS", "ChunkFinder", "FinderCounts", "Match", "SlicedReader", "TenantFinders"]
