"""Retrieval: load a corpus, split it, embed it, keep it, and find chunks for a question."""

from blendkv.retrieval.adapt import CallableRetriever
from blendkv.retrieval.collection import Collection, Counts, SyncReport
from blendkv.retrieval.dense import DenseIndex
from blendkv.retrieval.embed import Embedder, SentenceEmbedder
from blendkv.retrieval.fuse import reciprocal_rank_fusion
from blendkv.retrieval.lexical import LexicalIndex
from blendkv.retrieval.load import load_corpus, source_names
from blendkv.retrieval.retriever import HybridRetriever, RetrievedChunk, Retriever
from blendkv.retrieval.split import Splitter

__all__ = [
    "CallableRetriever",
    "Collection",
    "Counts",
    "DenseIndex",
    "Embedder",
    "HybridRetriever",
    "LexicalIndex",
    "RetrievedChunk",
    "Retriever",
    "SentenceEmbedder",
    "Splitter",
    "SyncReport",
    "load_corpus",
    "reciprocal_rank_fusion",
    "source_names",
]
