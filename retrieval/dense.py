"""Dense search: nearest embeddings by inner product, with FAISS."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from blendkv.errors import InputError
from blendkv.retrieval.artifacts import open_artifact
from blendkv.retrieval.collection import Collection

log = logging.getLogger(__name__)

# FAISS's stubs lack what its Python wrappers add to the generated classes.
_faiss: Any = faiss

HNSW_FROM = 50_000
"""Number of chunks from which the index is a graph (HNSW), which is searched approximately."""

_LINKS = 32
_EF_CONSTRUCTION = 100
_EF_SEARCH = 128
_VECTORS, _ROWS = "vectors.faiss", "rows.npy"


class DenseIndex:
    """The embeddings of a collection, memory-mapped; made anew when the collection has changed.

    Below ``hnsw_from`` chunks the search is exact. From there on it follows a graph, except under a filter, which is
    always searched exactly. A saved index gives equal answers to equal queries.

    Parameters
    ----------
    collection
        Chunks without embedding are not found; their number is logged when the index is made.
    hnsw_from
        Number of chunks from which a graph is built.

    Raises
    ------
    StoreError
        If the index cannot be written.
    """

    def __init__(self, collection: Collection, *, hnsw_from: int = HNSW_FROM) -> None:
        self._collection = collection
        self._hnsw_from = hnsw_from
        (self._index, self._rows), self.tag = open_artifact(collection, f"dense{hnsw_from}", self._write, _read)

    def __len__(self) -> int:
        return len(self._rows)

    def search(
        self, query: npt.NDArray[np.float32], k: int, allowed_rows: npt.NDArray[np.int64] | None = None
    ) -> list[tuple[int, float]]:
        """Return row numbers and inner products of the ``k`` best chunks, best first, ties by row number.

        Parameters
        ----------
        query
            float32 ``[dim]``.
        k
            At least 1.
        allowed_rows
            Search these only; rows that are not indexed do no harm.

        Raises
        ------
        InputError
            If the query has another dimension than the embeddings.
        """
        if not len(self):
            return []
        if query.shape != (self._index.d,):
            raise InputError(
                f"query vector has shape {query.shape}; ({self._index.d},) is allowed: use the collection's embedder"
            )
        index, parameters = self._index, None
        if allowed_rows is not None:
            found = np.flatnonzero(np.isin(self._rows, allowed_rows))
            if not found.size:
                return []
            k = min(k, found.size)
            # A graph walked under a filter loses its way: the vectors beneath it are scanned instead.
            index = _flat(index)
            bits = np.zeros(len(self), dtype=bool)
            bits[found] = True
            parameters = _faiss.SearchParameters(sel=_faiss.IDSelectorBitmap(np.packbits(bits, bitorder="little")))
        elif isinstance(index, faiss.IndexHNSW):
            parameters = _faiss.SearchParametersHNSW(efSearch=max(_EF_SEARCH, 2 * k))
        scores, places = index.search(
            np.ascontiguousarray(query[None], np.float32), min(k, len(self)), params=parameters
        )
        hits = [(int(self._rows[p]), float(s)) for s, p in zip(scores[0], places[0], strict=True) if p >= 0]
        return sorted(hits, key=lambda hit: (-hit[1], hit[0]))

    def _write(self, folder: Path) -> None:
        counts = self._collection.counts()
        if counts.embedded < counts.chunks:
            log.warning(
                "%s: %d of %d chunks have no embedding and are not found by dense search; run embed_missing",
                self._collection.path,
                counts.chunks - counts.embedded,
                counts.chunks,
            )
        rows: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        index: Any = None
        for page_rows, vectors in self._collection.embeddings():
            if index is None:
                index = _new_index(vectors.shape[1], graph=counts.embedded >= self._hnsw_from)
            index.add(vectors)
            rows.append(page_rows)
        faiss.write_index(index or faiss.IndexFlatIP(1), str(folder / _VECTORS))
        np.save(folder / _ROWS, np.concatenate(rows))


def _new_index(dim: int, *, graph: bool) -> Any:
    if not graph:
        return faiss.IndexFlatIP(dim)
    index = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _EF_CONSTRUCTION
    return index


def _flat(index: Any) -> Any:
    return faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index


def _read(folder: Path) -> tuple[Any, npt.NDArray[np.int64]]:
    index = faiss.read_index(str(folder / _VECTORS), faiss.IO_FLAG_MMAP_IFC)
    rows = np.load(folder / _ROWS, mmap_mode="r")
    if index.ntotal != len(rows):
        raise ValueError(f"{index.ntotal} vectors for {len(rows)} rows")
    return index, rows
