"""What is asked in an evaluation: items out of a file, a data set of the hub, or the generator."""

from __future__ import annotations

import gzip
import json
import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blendkv.errors import InputError
from blendkv.eval.formats import FORMATS, Row, Unanswerable, guess
from blendkv.eval.items import EvalItem
from blendkv.eval.synth import DEFAULT_COUNT, generate, parse_spec

SYNTH = "synth"
"""Format of generated items, whose ``data`` is a spec; see `blendkv.eval.synth.parse_spec`."""

_log = logging.getLogger(__name__)
_JSON = (".json", ".jsonl", ".ndjson")
_TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_items(
    data: str, format: str | None = None, *, seed: int = 0, limit: int | None = None, split: str | None = None
) -> list[EvalItem]:
    """Load what an evaluation asks, in the order of the data. Formats and examples: docs/eval-data.md.

    Parameters
    ----------
    data
        A file: JSON, JSONL (each may be gzipped), Parquet, CSV or Arrow; a folder that ``datasets`` can load; a data
        set of the hub, ``NAME[:CONFIG][@SPLIT]``; or a spec of generated items.
    format
        Name of the format; None to guess it from the first record.
    seed
        Of generated items, and of the few-shot examples in SAMSum's.
    limit
        Most items; None for all, or for 48 generated ones.
    split
        Of a data set with splits; by default ``validation``, ``test`` or the only one.

    Returns
    -------
    list[EvalItem]
        With ids ``<format>-<number>``, the number being that of the record, from 0.

    Raises
    ------
    InputError
        If the data cannot be read, is empty, fits no format, or a record is malformed; the record is named.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}; 1 or more is allowed, or none for all items")
    if format not in (None, SYNTH, *FORMATS.names()):
        names = ", ".join((*FORMATS.names(), SYNTH))
        raise InputError(f"unknown format of evaluation data {format!r}; allowed: {names}")
    if format == SYNTH or (format is None and _is_spec(data)):
        if split is not None:
            raise InputError(f"split {split!r} of generated items; they have none: leave it out")
        kinds, difficulty = parse_spec(data)
        return generate(kinds, limit or DEFAULT_COUNT, seed, difficulty)
    records = _records(data, split)
    if not len(records.rows):
        raise InputError(f"{data} holds no record; give one question or more")
    return _items(records, format or guess(records.at(0), records.where(0)), seed, limit)


def _is_spec(data: str) -> bool:
    if not data.strip() or Path(data).exists():
        return False
    try:
        parse_spec(data)
    except InputError:
        return False
    return True


@dataclass(frozen=True)
class _Records:
    """The rows of the data, and what errors call each of them."""

    rows: Sequence[Any]
    where: Callable[[int], str]

    def at(self, index: int) -> Mapping[str, Any]:
        row = self.rows[index]
        if not isinstance(row, Mapping):
            raise InputError(f"{self.where(index)}: a JSON {type(row).__name__}; an object with fields is needed")
        return row

    def others(self, index: int, count: int, rng: random.Random) -> list[Mapping[str, Any]]:
        """``count`` other rows than ``index``, or all of them if there are fewer."""
        pool = [i for i in range(len(self.rows)) if i != index]
        return [self.at(i) for i in rng.sample(pool, min(count, len(pool)))]


def _items(records: _Records, name: str, seed: int, limit: int | None) -> list[EvalItem]:
    chosen = FORMATS.get(name)
    items: list[EvalItem] = []
    unanswerable = 0
    for index in range(len(records.rows)):
        if len(items) == limit:
            break
        rng = random.Random(f"{seed}-{name}-{index}")
        others = partial(records.others, index, rng=rng)
        row = Row(records.at(index), records.where(index), f"{name}-{index:04d}", chosen.needs, others)
        try:
            items.append(chosen.read(row))
        except Unanswerable:
            unanswerable += 1
    if unanswerable:
        _log.warning("%d records are marked as unanswerable and left out", unanswerable)
    if not items:
        raise InputError(f"all {unanswerable} records are marked as unanswerable; give questions with answers")
    return items


def _records(data: str, split: str | None) -> _Records:
    path = Path(data)
    if path.is_file():
        kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if kind.lower() in _JSON:
            if split is not None:
                raise InputError(f"split {split!r} of the file {data}; a file has none: leave it out")
            return _json_file(path)
        if path.suffix.lower() not in _TABLES:
            allowed = ", ".join((*_JSON, *_TABLES))
            raise InputError(
                f"{data} is not a file of evaluation data; suffixes allowed: {allowed}, also {_JSON[0]}.gz"
            )
        return _dataset(data, split, _TABLES[path.suffix.lower()], data_files=data)
    if path.is_dir():
        return _dataset(data, split, data)
    name, _, named_split = data.removeprefix("hf:").partition("@")
    name, _, config = name.partition(":")
    if not _HUB_NAME.fullmatch(name) or Path(name).suffix.lower() in (*_JSON, *_TABLES, ".gz"):
        raise InputError(f"{data}: no such file or folder; give a file, NAME[:CONFIG][@SPLIT] of the hub, or {SYNTH}")
    return _dataset(data, split or named_split or None, name, config or None)


def _json_file(path: Path) -> _Records:
    """A JSON list, an object with such a list under ``data``, or an object per line."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); give a UTF-8 file of JSON or JSONL") from error
    if ".json" in path.suffixes:
        try:
            whole = json.loads(text)
        except json.JSONDecodeError as error:
            # Many a file of lines is called .json: the first line is whole then, and more follows.
            if error.msg != "Extra data":
                raise InputError(f"{path} is not JSON ({error}); mend the file") from None
        else:
            rows = whole.get("data") if isinstance(whole, dict) and "data" in whole else whole
            if isinstance(rows, list):
                return _Records(rows, lambda index: f"{path}, record {index + 1}")
            if "\n" in text.strip() or not isinstance(whole, dict):
                raise InputError(f"{path} holds a JSON {type(rows).__name__}; a list of records is needed")
    numbers, rows = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            numbers.append(number)
            rows.append(_json_line(line, f"{path}, line {number}"))
    return _Records(rows, lambda index: f"{path}, line {numbers[index]}")


def _json_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); one JSON object per line is needed") from None


def _dataset(data: str, split: str | None, name: str, config: str | None = None, **options: Any) -> _Records:
    """Rows of a data set that the ``datasets`` library loads."""
    import datasets

    folder = Path(name)
    saved = (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config, **options)
    except Exception as error:  # data sets come with readers of their own, which raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{data} cannot be loaded ({reason}); check the name and the network, or give a local file"
        ) from error
    if isinstance(loaded, datasets.Dataset):
        loaded = {str(loaded.split or "train"): loaded}
    splits = list(loaded)
    wanted = split or next((s for s in ("validation", "test") if s in splits), splits[0])
    if wanted not in splits or (split is None and wanted not in ("validation", "test") and len(splits) > 1):
        raise InputError(f"{data} has no split {wanted!r} to ask from; splits there: {', '.join(splits)}: name one")
    return _Records(loaded[wanted], lambda index: f"{data}, {wanted} record {index + 1}")
