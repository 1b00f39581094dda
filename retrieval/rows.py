"""Reading many documents from one source: JSONL and CSV files, and data sets of the ``datasets`` library."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blendkv.errors import DocumentError
from blendkv.retrieval.formats import decode, mark_of, open_file, read_bytes, shown
from blendkv.types import Document

DEFAULT_COLUMN = "text"

ROW_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
"""Suffixes, in lower case, of the files that hold one document per row."""


@dataclass(frozen=True)
class RowSource:
    """Where rows come from: ``id`` leads the documents' ids, ``name`` is what errors say, ``column`` holds the text.

    ``metadata`` is part of every document's; ``limit`` is the greatest number of bytes of a row.
    """

    id: str
    name: str
    column: str | None
    metadata: Mapping[str, Any]
    limit: int

    def document(self, row: Mapping[str, Any], number: int) -> Document:
        """Make a document of one row; ``number`` counts from 1 and is the row's id unless it has a field ``id``.

        Raises
        ------
        DocumentError
            If the column is missing, no text, blank or too large, or the metadata are no JSON.
        """
        where = f"{self.name}, row {number}"
        column = self.column or DEFAULT_COLUMN
        if column not in row:
            raise self.unknown_column(row, where)
        text = row[column]
        if not isinstance(text, str):
            raise DocumentError(f"{where}: column {column!r} holds {type(text).__name__}; text is allowed")
        if not text.strip():
            raise DocumentError(f"{where}: column {column!r} is empty; remove the row or fill it")
        try:
            size = len(text.encode())
            metadata = dict(self.metadata) | _metadata(row, column)
        except ValueError as error:
            raise DocumentError(f"{where}: not expressible as Unicode and JSON ({error}); mend the row") from None
        if size > self.limit:
            raise DocumentError(f"{where}: {size} bytes of text; at most {self.limit} are allowed: split the row")
        row_id = row.get("id")
        known = isinstance(row_id, str | int) and row_id != ""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        return Document(id=f"{self.id}:{row_id if known else number}", text=text, metadata=metadata)

    def unknown_column(self, row: Mapping[str, Any], where: str) -> DocumentError:
        """Return the error for a row without the wanted column."""
        allowed = ", ".join(str(name) for name in row) or "none"
        return DocumentError(
            f"{where}: no column {self.column or DEFAULT_COLUMN!r}; columns there: {allowed}: name one with #COLUMN"
        )


def _metadata(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return the field ``metadata`` with the title, or the scalar fields other than text and id."""
    given = row.get("metadata")
    if column != "metadata" and isinstance(given, Mapping):
        picked = {"title": row["title"], **given} if _is_scalar(row.get("title")) else dict(given)
    else:
        picked = {key: value for key, value in row.items() if key not in (column, "id") and _is_scalar(value)}
    cleaned: dict[str, Any] = json.loads(json.dumps(picked, default=str, allow_nan=False, ensure_ascii=False).encode())
    return cleaned


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def read_rows(path: Path, source: RowSource) -> Iterator[Document | DocumentError]:
    """Read a JSONL, CSV or TSV file row by row; a bad row gives its error and the next row follows."""
    with _open_text(path, source.limit) as file:
        if path.suffix.lower() in (".csv", ".tsv"):
            yield from _read_csv(file, source, "\t" if path.suffix.lower() == ".tsv" else ",")
        else:
            yield from _read_jsonl(file, source)


def _open_text(path: Path, limit: int) -> BinaryIO:
    """Open a row file as UTF-8 bytes, behind its byte order mark; other encodings are read whole."""
    file = open_file(path, None)
    mark, encoding = mark_of(file.read(4))
    if encoding == "utf-8":
        file.seek(len(mark))
        return file
    file.close()
    return io.BytesIO(decode(read_bytes(path, limit), shown(path)).encode())


def _read_jsonl(file: BinaryIO, source: RowSource) -> Iterator[Document | DocumentError]:
    number = 0
    first = True
    while line := file.readline(source.limit + 1):
        number += 1
        if len(line) > source.limit and not line.endswith(b"\n"):
            yield DocumentError(
                f"{source.name}, line {number}: more than {source.limit} bytes; split the line or raise the limit"
            )
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            continue
        if not line.strip():
            continue
        try:
            row = _parse_line(line, f"{source.name}, line {number}")
            if first and (source.column or DEFAULT_COLUMN) not in row:
                yield source.unknown_column(row, f"{source.name}, line {number}")
                return
            first = False
            yield source.document(row, number)
        except DocumentError as error:
            yield error


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(decode(line, where), parse_constant=_refuse_constant)
    except DocumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: not JSON ({error}); one JSON object per line is allowed") from None
    if not isinstance(row, dict):
        raise DocumentError(f"{where}: a JSON {type(row).__name__}; one JSON object per line is allowed")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _read_csv(file: BinaryIO, source: RowSource, delimiter: str) -> Iterator[Document | DocumentError]:
    # The csv module's own limit of 128 KiB per field is process-wide; it is only ever raised here.
    csv.field_size_limit(max(csv.field_size_limit(), source.limit))
    start = file.tell()
    lines = io.TextIOWrapper(file, encoding="utf-8", newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True, restval="")
    number = 0
    try:
        if (source.column or DEFAULT_COLUMN) not in (reader.fieldnames or ()):
            yield source.unknown_column(dict.fromkeys(reader.fieldnames or ()), f"{source.name}, header")
            return
        for number, row in enumerate(reader, start=1):
            if None in row:
                yield DocumentError(
                    f"{source.name}, row {number}: more fields than the {len(reader.fieldnames or ())} of the header; "
                    "quote fields that hold the delimiter"
                )
                continue
            try:
                yield source.document(row, number)
            except DocumentError as error:
                yield error
    except csv.Error as error:
        yield DocumentError(f"{source.name}, after row {number}: not CSV ({error}); quote its fields properly")
    except UnicodeDecodeError:
        offset = _first_bad_byte(file, start)
        yield DocumentError(f"{source.name}: invalid UTF-8 at byte {offset}; save the file as UTF-8")
    finally:
        lines.detach()  # the caller closes the file


def _first_bad_byte(file: BinaryIO, start: int) -> int:
    """Offset of the first byte of a file that is not UTF-8: a text reader knows it only within its buffer."""
    file.seek(start)
    offset = start
    for line in file:
        try:
            line.decode()
        except UnicodeDecodeError as error:
            return offset + error.start
        offset += len(line)
    return offset


def read_dataset(spec: str, source_name: str, limit: int) -> Iterator[Document | DocumentError]:
    """Read ``hf:NAME[:CONFIG][@SPLIT][#COLUMN]`` through the ``datasets`` library.

    ``NAME`` is a data set on the hub, or a local path: of a folder made by ``save_to_disk``, or of data files.
    Without a split, ``train`` is read, or the only one. Ids are ``<source_name>:<row>``.
    """
    rest, _, column = spec.removeprefix("hf:").partition("#")
    rest, _, split = rest.partition("@")
    name, _, config = rest.partition(":")
    try:
        rows = _load_dataset(name, config or None, split or None)
    except DocumentError as error:
        yield error
        return
    source = RowSource(source_name, spec, column or None, {"source": source_name}, limit)
    if (column or DEFAULT_COLUMN) not in rows.column_names:
        yield source.unknown_column(dict.fromkeys(rows.column_names), f"{spec}, header")
        return
    for number, row in enumerate(rows, start=1):
        try:
            yield source.document(row, number)
        except DocumentError as error:
            yield error


def _load_dataset(name: str, config: str | None, split: str | None) -> Any:
    import datasets

    path = Path(name)
    saved = (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config)
    except Exception as error:  # data sets come with readers of their own, which raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DocumentError(f"hf:{name}: cannot be loaded ({reason}); check the name, or the path") from error
    if isinstance(loaded, datasets.Dataset):
        own = str(loaded.split or "train")
        if split not in (None, own):
            raise DocumentError(f"hf:{name}: no split {split!r}; it has {own!r} only")
        return loaded
    splits = list(loaded)
    wanted = split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if wanted not in splits:
        raise DocumentError(f"hf:{name}: no split {wanted!r}; splits there: {', '.join(splits)}: name one with @SPLIT")
    return loaded[wanted]
