"""A collection: the documents, chunks and embeddings of a corpus, in one SQLite file that survives ``kill -9``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from blendkv.errors import DocumentError, InputError, StoreMismatchError
from blendkv.retrieval.database import Database
from blendkv.retrieval.embed import Embedder, check_vectors
from blendkv.retrieval.filters import Where, where_sql
from blendkv.retrieval.records import CHUNK_COLUMNS, chunk_of, columns_of, to_json
from blendkv.types import Chunk, Document

Progress = Callable[[int, int | None], None]
"""Called with the number of things done and the total, or None where that is not known."""

_RESERVED = ("format", "generation", "identity", "embedder", "splitter")
_PAGE = 256


class DocumentSplitter(Protocol):
    """What ``sync`` needs of a splitter."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What chunks depend on, as JSON values; ``tokenizer`` names whose token ids they carry."""

    def split(self, document: Document) -> list[Chunk]:
        """Return the chunks of a document, in order."""


@dataclass(frozen=True)
class SyncReport:
    """What ``sync`` did: numbers of documents, and of the chunks that it wrote."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    new_chunks: int = 0


@dataclass(frozen=True)
class Counts:
    """What a collection holds; ``embedded`` is the number of chunks that have an embedding."""

    documents: int
    chunks: int
    tokens: int
    embedded: int


class Collection:
    """Documents and chunks under a folder, in ``collection.sqlite``.

    Many processes may have it open. Every change is one transaction and raises ``generation`` by one.
    Chunks are also known by a row number, which is never given twice.

    Parameters
    ----------
    path
        Folder of the store; made if missing.

    Raises
    ------
    InputError
        If the path is a file.
    StoreMismatchError
        If the collection is of a newer format.
    StoreError
        If it cannot be opened or is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._db = Database(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def generation(self) -> int:
        """Number of changes so far."""
        return int(self.get_meta("generation"))

    @property
    def tag(self) -> str:
        """``<identity>-<generation>``: equal tags mean equal contents, even if a store was removed and made again."""
        return f"{self.get_meta('identity')}-{self.get_meta('generation')}"

    def get_meta(self, key: str, default: Any = None) -> Any:
        """Return the JSON value under ``key``; ``embedder`` and ``splitter`` say what made the contents."""
        found = self._db.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return json.loads(found[0][0]) if found else default

    def set_meta(self, key: str, value: Any) -> None:
        """Keep a JSON value (a model's name, a fingerprint) under ``key``.

        Raises
        ------
        InputError
            If the key belongs to the collection, or the value is no JSON.
        """
        if key in _RESERVED:
            raise InputError(
                f"meta key {key!r} is the collection's own; any other than {', '.join(_RESERVED)} is allowed"
            )
        self._set_meta(key, value)

    def _set_meta(self, key: str, value: Any) -> None:
        self._db.change("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, to_json(value, f"meta key {key!r}")))

    def _bump(self) -> None:
        self._db.change("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'generation'")

    def sync(
        self,
        documents: Iterable[Document],
        splitter: DocumentSplitter,
        *,
        prune: bool = False,
        sources: Sequence[str] | None = None,
        progress: Progress | None = None,
        on_skip: Callable[[DocumentError], None] | None = None,
    ) -> SyncReport:
        """Bring the collection in line with ``documents``.

        A new document is added; one whose text, metadata or splitter settings differ replaces the stored one, and
        chunks whose text stays keep their embedding; an equal one is not even tokenised. Each document is one
        transaction: after a crash, the next run continues.

        Parameters
        ----------
        documents
            Read once, in order.
        splitter
            Makes the chunks.
        prune
            Also remove the stored documents that ``documents`` does not hold. Mind documents that could not be
            read this time: they are removed too.
        sources
            With ``prune``: source names (see ``source_names``) to which the removal is confined. Default: all.
        progress
            Called after each document.
        on_skip
            Called with the error of a document that the splitter refuses; a stored one of that id stays as it is.
            By default the error is raised.

        Raises
        ------
        InputError
            If two documents have one id, or metadata are no JSON. What came before is kept.
        StoreMismatchError
            If the collection's token ids are another tokenizer's.
        DocumentError
            From the splitter, for a document without text. What came before is kept.
        """
        self._claim_splitter(splitter)
        total = len(documents) if isinstance(documents, Sequence) else None
        outcome = {"added": 0, "changed": 0, "unchanged": 0}
        new_chunks = 0
        seen: set[str] = set()
        for document in documents:
            if document.id in seen:
                raise InputError(f"document id {document.id!r} came twice in one sync; ids must differ: rename one")
            seen.add(document.id)
            try:
                what, written = self._put(document, splitter)
            except DocumentError as error:
                if on_skip is None:
                    raise
                on_skip(error)
                continue
            outcome[what] += 1
            new_chunks += written
            if progress:
                progress(len(seen), total)
        removed = 0
        if prune:
            stale = [known for known in self.document_ids() if known not in seen and _belongs(known, sources)]
            for known in stale:
                self.remove_document(known)
            removed = len(stale)
        return SyncReport(**outcome, removed=removed, new_chunks=new_chunks)

    def _claim_splitter(self, splitter: DocumentSplitter) -> None:
        settings = dict(splitter.settings)
        recorded = self.get_meta("splitter")
        if recorded == settings:
            return
        if recorded and recorded["tokenizer"] != settings["tokenizer"] and self.counts().documents:
            raise StoreMismatchError(
                f"{self.path}: its chunks carry token ids of tokenizer {recorded['tokenizer'][:12]}, the one given is "
                f"{settings['tokenizer'][:12]}; use the model that the store was made with, or another store folder"
            )
        self._set_meta("splitter", settings)

    def _put(self, document: Document, splitter: DocumentSplitter) -> tuple[str, int]:
        """Add, replace or leave a document; return which, and the number of chunks written."""
        metadata = to_json(document.metadata, f"metadata of document {document.id!r}")
        basis = "\n".join([document.digest, metadata, to_json(splitter.settings, "splitter settings")])
        digest = hashlib.blake2b(basis.encode(), digest_size=16).hexdigest()
        stored = self._db.rows("SELECT digest FROM documents WHERE id = ?", (document.id,))
        if stored and stored[0][0] == digest:
            return "unchanged", 0
        chunks = splitter.split(document)
        with self._db.transaction():
            known = dict(
                self._db.rows(
                    "SELECT c.text, c.embedding FROM chunks c JOIN documents d ON c.document = d.row "
                    "WHERE d.id = ? AND c.embedding IS NOT NULL",
                    (document.id,),
                )
            )
            replaced, _ = self._db.change("DELETE FROM documents WHERE id = ?", (document.id,))
            _, row = self._db.change(
                "INSERT INTO documents (id, digest, metadata) VALUES (?, ?, ?)", (document.id, digest, metadata)
            )
            self._db.change_many(
                "INSERT INTO chunks (document, position, text, token_ids, start, end, metadata, embedding) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(row, *columns_of(chunk, document), known.get(chunk.text)) for chunk in chunks],
            )
            self._bump()
        return ("changed" if replaced else "added"), len(chunks)

    def remove_document(self, document_id: str) -> None:
        """Remove a document and its chunks.

        Raises
        ------
        InputError
            If there is none of that id.
        """
        with self._db.transaction():
            count, _ = self._db.change("DELETE FROM documents WHERE id = ?", (document_id,))
            if not count:
                raise InputError(f"no document {document_id!r} in {self.path}; see Collection.document_ids()")
            self._bump()

    def document_ids(self) -> list[str]:
        """Ids of all documents, sorted."""
        return [row[0] for row in self._db.rows("SELECT id FROM documents ORDER BY id")]

    def counts(self) -> Counts:
        """Count documents, chunks, tokens and embeddings."""
        documents = self._db.rows("SELECT count(*) FROM documents")[0][0]
        chunks, size = self._db.rows("SELECT count(*), coalesce(sum(length(token_ids)), 0) FROM chunks")[0]
        missing = self._db.rows("SELECT count(*) FROM chunks WHERE embedding IS NULL")[0][0]
        return Counts(documents, chunks, size // 4, chunks - missing)

    def chunks(self, document_id: str | None = None) -> Iterator[Chunk]:
        """Yield the chunks of all documents, or of one, in row order; what changes meanwhile may or may not show."""
        condition, values = ("1", []) if document_id is None else ("d.id = ?", [document_id])
        for _, chunk in self._pages(condition, values):
            yield chunk

    def chunk(self, chunk_id: str) -> Chunk:
        """Return the chunk with that id.

        Raises
        ------
        InputError
            If there is none.
        """
        document_id, _, index = chunk_id.rpartition("#")
        if index.isascii() and index.isdigit():
            for _, chunk in self._pages("d.id = ? AND c.position = ?", [document_id, int(index)]):
                return chunk
        raise InputError(f"no chunk {chunk_id!r} in {self.path}; ids are <document id>#<index>")

    def chunks_by_row(self, rows: Sequence[int]) -> dict[int, Chunk]:
        """Return chunks by row number; rows that are gone are left out."""
        marks = ",".join("?" * len(rows))
        return dict(self._pages(f"c.row IN ({marks})", [int(row) for row in rows]))

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yield row number and text of every chunk, in row order."""
        last = -1
        while page := self._db.rows("SELECT row, text FROM chunks WHERE row > ? ORDER BY row LIMIT ?", (last, _PAGE)):
            yield from page
            last = page[-1][0]

    def rows_where(self, where: Where) -> npt.NDArray[np.int64]:
        """Row numbers of the chunks whose metadata match, rising, int64 ``[chunks]``.

        Raises
        ------
        InputError
            If a filter's value is neither a scalar nor a list of scalars.
        """
        condition, values = where_sql(where)
        found = self._db.rows(
            f"SELECT c.row FROM chunks c JOIN documents d ON c.document = d.row WHERE {condition} ORDER BY c.row",
            values,
        )
        return np.array([row for (row,) in found], dtype=np.int64)

    def _pages(self, condition: str, values: Sequence[Any]) -> Iterator[tuple[int, Chunk]]:
        """Yield row number and chunk in row order, read page by page so that no lock is held in between."""
        last = -1
        while page := self._db.rows(
            f"SELECT c.row, {CHUNK_COLUMNS} FROM chunks c JOIN documents d ON c.document = d.row "
            f"WHERE c.row > ? AND ({condition}) ORDER BY c.row LIMIT {_PAGE}",
            (last, *values),
        ):
            for row, *columns in page:
                yield row, chunk_of(columns)
            last = page[-1][0]

    def embed_missing(self, embedder: Embedder, *, batch_size: int = 256, progress: Progress | None = None) -> int:
        """Embed the chunks that have no embedding yet, ``batch_size`` per transaction; return how many.

        Raises
        ------
        InputError
            If the collection's embeddings are another embedder's, or the embedder returns another shape or numbers
            that are not finite.
        """
        self.check_embedder(embedder)
        total = self._db.rows("SELECT count(*) FROM chunks WHERE embedding IS NULL")[0][0]
        if not total:
            return 0
        made = {"name": embedder.name, "dim": embedder.dim}
        if self.get_meta("embedder") is None:
            self._set_meta("embedder", made)
        done, last = 0, -1
        while page := self._db.rows(
            "SELECT row, text FROM chunks WHERE embedding IS NULL AND row > ? ORDER BY row LIMIT ?", (last, batch_size)
        ):
            vectors = embedder.encode([text for _, text in page])
            check_vectors(vectors, (len(page), self.get_meta("embedder")["dim"]), embedder.name)
            blobs = [np.ascontiguousarray(vector, dtype="<f4").tobytes() for vector in vectors]
            with self._db.transaction():
                # A document that was replaced meanwhile has other rows: its old ones are simply not there any more.
                self._db.change_many(
                    "UPDATE chunks SET embedding = ? WHERE row = ?",
                    [(blob, row) for blob, (row, _) in zip(blobs, page, strict=True)],
                )
                self._bump()
            done, last = done + len(page), page[-1][0]
            if progress:
                progress(done, max(total, done))
        return done

    def check_embedder(self, embedder: Embedder) -> None:
        """Refuse an embedder by another name than the one that made the collection's embeddings.

        Raises
        ------
        InputError
            If the names differ.
        """
        recorded = self.get_meta("embedder")
        if recorded and recorded["name"] != embedder.name:
            raise InputError(
                f"{self.path}: embedded with {recorded['name']!r}, the embedder given is {embedder.name!r}; "
                "use the former, or call Collection.clear_embeddings() first"
            )

    def clear_embeddings(self) -> None:
        """Forget all embeddings and their embedder, so that another one can be used."""
        with self._db.transaction():
            self._db.change("UPDATE chunks SET embedding = NULL")
            self._db.change("DELETE FROM meta WHERE key = 'embedder'")
            self._bump()

    def embeddings(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Yield pages of row numbers, int64 ``[n]``, rising, and embeddings, float32 ``[n, dim]``."""
        last = -1
        while page := self._db.rows(
            "SELECT row, embedding FROM chunks WHERE embedding IS NOT NULL AND row > ? ORDER BY row LIMIT 4096", (last,)
        ):
            last = page[-1][0]
            vectors = np.frombuffer(b"".join(blob for _, blob in page), dtype="<f4").reshape(len(page), -1)
            yield np.array([row for row, _ in page], dtype=np.int64), vectors


def _belongs(document_id: str, sources: Sequence[str] | None) -> bool:
    """Say whether a document's id begins with one of the source names."""
    if sources is None:
        return True
    return any(document_id == name or document_id.startswith((f"{name}/", f"{name}:")) for name in sources)
