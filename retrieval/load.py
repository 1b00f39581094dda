"""Loading a corpus: named sources become documents with stable ids; what cannot be read is reported, not lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blendkv.errors import DocumentError
from blendkv.retrieval.formats import READERS, read_text, shown
from blendkv.retrieval.rows import ROW_SUFFIXES, RowSource, read_dataset, read_rows
from blendkv.types import Document

MAX_DOCUMENT_BYTES = 32 * 2**20

PYTHON_REFERENCE = "python-reference"
"""Name of the Python language reference that comes with every CPython."""

Item = Document | DocumentError


def load_corpus(
    sources: Sequence[str | Path],
    *,
    on_skip: Callable[[DocumentError], None],
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> Iterator[Document]:
    """Read documents from sources, one after the other, lazily.

    A source is a file; a folder (with its subfolders, sorted, without hidden entries); ``FILE#COLUMN`` or
    ``FOLDER#COLUMN`` for the text column of JSONL and CSV files (default ``text``);
    ``hf:NAME[:CONFIG][@SPLIT][#COLUMN]`` for a data set of the ``datasets`` library, local ones included; or
    ``python-reference``. Files are read by suffix: HTML, PDF, JSONL, CSV, TSV; every other one as text.

    Ids are ``<source name>/<relative path>`` for files in a folder and ``<source name>`` for a single file; rows of
    a file or data set add ``:<field id, or row number>``. A source's name is its last path part; sources of one call
    that share it are told apart by as many leading folders as needed. ``metadata["source"]`` is that name, unless a
    row has a field ``source`` of its own.

    Parameters
    ----------
    sources
        What to read; a source named twice is read once.
    on_skip
        Called with the error of everything that cannot be read, a source itself included. Reading goes on; to stop,
        raise the error there.
    max_document_bytes
        Greatest size of a file, or of a row of a JSONL or CSV file. Larger ones are refused from their size.

    Yields
    ------
    Document
        With text that is not blank.
    """
    seen: set[str] = set()
    for source in _named(sources):
        for item in _checked(source.read(max_document_bytes)):
            if isinstance(item, Document) and item.id in seen:
                item = DocumentError(f"{item.id}: this id came before; ids of documents must differ: mend field 'id'")
            if isinstance(item, DocumentError):
                on_skip(item)
                continue
            seen.add(item.id)
            yield item


def source_names(sources: Sequence[str | Path]) -> list[str]:
    """Return the names that begin the ids of the documents that ``load_corpus`` reads from ``sources``."""
    return [source.name for source in _named(sources)]


def _checked(items: Iterator[Item]) -> Iterator[Item]:
    """Turn the error that ends a source into its last item."""
    try:
        yield from items
    except DocumentError as error:
        yield error


@dataclass(frozen=True)
class _Source:
    """A source under its name; ``path`` is None for one that is no file or folder."""

    spec: str
    name: str
    path: Path | None = None
    column: str | None = None

    def read(self, limit: int) -> Iterator[Item]:
        if self.path is not None:
            return _read_path(self, self.path, limit)
        return read_dataset(self.spec, self.name, limit) if self.spec.startswith("hf:") else _read_reference()


def _named(sources: Sequence[str | Path]) -> list[_Source]:
    """Parse sources, drop repeated ones, and give those of equal name longer ones."""
    parsed = list(dict.fromkeys(_parse(source) for source in sources))
    for depth in range(2, 2 + max((len(s.path.parts) for s in parsed if s.path), default=0)):
        names = [source.name for source in parsed]
        parsed = [
            _Source(s.spec, "/".join(s.path.parts[-depth:]).lstrip("/"), s.path, s.column)
            if s.path and names.count(s.name) > 1
            else s
            for s in parsed
        ]
    return [_Source(s.spec, shown(s.name), s.path, s.column) for s in parsed]


def _parse(source: str | Path) -> _Source:
    if source == PYTHON_REFERENCE or (isinstance(source, str) and source.startswith("hf:")):
        # The column is no part of the name: like that of a file, it does not change what a row is called.
        return _Source(str(source), str(source).partition("#")[0])
    path, column = Path(source), None
    if "#" in str(source) and not os.path.lexists(path):
        text, _, column = str(source).rpartition("#")
        path = Path(text)
    path = Path(os.path.abspath(path.expanduser()))
    return _Source("", path.name or "root", path, column or None)


def _read_path(source: _Source, path: Path, limit: int) -> Iterator[Item]:
    if not os.path.isdir(path):
        if source.column and path.suffix.lower() not in ROW_SUFFIXES:
            raise DocumentError(
                f"{shown(path)}: has no columns; #COLUMN is for {', '.join(ROW_SUFFIXES)} files and folders: drop it"
            )
        yield from _read_file(path, source.name, source, limit)
        return
    empty = True
    for item in _walk(path, frozenset()):
        empty = False
        if isinstance(item, DocumentError):
            yield item
        else:
            relative = shown(item.relative_to(path).as_posix())
            yield from _checked(_read_file(item, f"{source.name}/{relative}", source, limit))
    if empty:
        raise DocumentError(f"{shown(path)}: no files in this folder (hidden ones do not count); name another one")


def _walk(folder: Path, above: frozenset[str]) -> Iterator[Path | DocumentError]:
    """Yield the files below a folder, sorted; a link back to a folder above is not followed."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        yield DocumentError(f"{shown(folder)}: the folder cannot be read ({error.strerror}); change its mode")
        return
    for name in names:
        path = folder / name
        if os.path.isdir(path):
            yield from _walk(path, above | {real})
        else:
            yield path


def _read_file(path: Path, document_id: str, source: _Source, limit: int) -> Iterator[Item]:
    metadata = {"source": source.name, "path": document_id}
    suffix = path.suffix.lower()
    if suffix in ROW_SUFFIXES:
        yield from read_rows(path, RowSource(document_id, shown(path), source.column, metadata, limit))
        return
    text, title = READERS.get(suffix, read_text)(path, limit)
    if not text.strip():
        raise DocumentError(f"{shown(path)}: no text in this file; remove it or fill it")
    yield Document(id=document_id, text=text, metadata={**metadata, "title": title or shown(path.stem)})


def _read_reference() -> Iterator[Item]:
    # A top-level import would load half a megabyte of text for everybody.
    from pydoc_data.topics import topics

    for topic in sorted(topics):
        yield Document(
            id=f"{PYTHON_REFERENCE}/{topic}",
            text=topics[topic],
            metadata={"source": PYTHON_REFERENCE, "title": topic},
        )
