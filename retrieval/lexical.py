"""Lexical search: BM25 over words, with bm25s."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blendkv.retrieval.artifacts import open_artifact
from blendkv.retrieval.collection import Collection

# Kana, Han and Hangul are written without spaces: there every character is a word.
_UNSPACED = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+"
_ROWS = "rows.npy"


def _library() -> Any:
    """bm25s, imported when it is first needed: it imports numba where that is installed, which takes a second.

    vLLM's CPU platform also fails to start in a process that has numba loaded (seen in 0.32).
    """
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import sets DEBUG
    return bm25s


class LexicalIndex:
    """BM25 (Lucene's variant, k1 1.5, b 0.75) over a collection's chunks, memory-mapped; made anew when it changed.

    Raises
    ------
    StoreError
        If the index cannot be written.
    """

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        (self._bm25, self._rows), self.tag = open_artifact(collection, "lexical", self._write, _read)

    def __len__(self) -> int:
        return len(self._rows)

    def search(self, query: str, k: int, allowed_rows: npt.NDArray[np.int64] | None = None) -> list[tuple[int, float]]:
        """Return row numbers and scores of the ``k`` best chunks that share a word with the query, best first.

        Ties go by row number; ``allowed_rows`` are searched only, if given. A query without any known word finds
        nothing.
        """
        words = re.findall(_WORD, query.lower())
        if self._bm25 is None or not words:
            return []
        scores = self._bm25.get_scores(words)
        if allowed_rows is not None:
            scores[~np.isin(self._rows, allowed_rows)] = 0
        hits = np.flatnonzero(scores > 0)
        best = hits[np.argsort(-scores[hits], kind="stable")[:k]]
        return [(int(self._rows[place]), float(scores[place])) for place in best]

    def _write(self, folder: Path) -> None:
        rows: list[int] = []
        texts: list[str] = []
        for row, text in self._collection.texts():
            rows.append(row)
            texts.append(text)
        bm25s = _library()
        words = bm25s.tokenize(texts, lower=True, token_pattern=_WORD, stopwords=None, show_progress=False)
        # bm25s cannot index a corpus without a word; such a folder holds the rows only.
        if words.vocab:
            bm25 = bm25s.BM25(method="lucene", backend="numpy")
            bm25.index(words, show_progress=False)
            bm25.save(folder, show_progress=False)
        np.save(folder / _ROWS, np.array(rows, dtype=np.int64))


def _read(folder: Path) -> tuple[Any, npt.NDArray[np.int64]]:
    rows = np.load(folder / _ROWS, mmap_mode="r")
    if not (folder / "params.index.json").exists():
        return None, rows
    bm25 = _library().BM25.load(folder, mmap=True, show_progress=False)
    if bm25.scores["num_docs"] != len(rows):
        raise ValueError(f"{bm25.scores['num_docs']} texts for {len(rows)} rows")
    return bm25, rows
