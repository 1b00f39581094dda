"""What a daemon's memory held when it ended, by price, so that the next one can bring it back.

A file beside the index: the digest (xxh3, 128 bits) of the rest, and a table in msgpack. It is only advice: without it,
or with a damaged one, chunks come back by their last use. It holds chunk keys, prices and workload classes, nothing of
what the chunks are made of.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from blendkv.daemon.messages import Key, Word
from blendkv.market.policy import Standing
from blendkv.store.files import delete_leftover, temporary_file, write_all
from blendkv.store.opening import PRICES_NAME

FORMAT = 1
MOST_ROWS = 1 << 16
"""Chunks in the table, the dearest."""
_DIGEST = 16
_MOST_BYTES = MOST_ROWS * 128
_log = logging.getLogger(__name__)


class _Row(msgspec.Struct, array_like=True):
    key: Key
    price: float
    workload: Annotated[Word, msgspec.Meta(min_length=1)]


class _Table(msgspec.Struct, array_like=True):
    format: int
    rows: Annotated[list[_Row], msgspec.Meta(max_length=MOST_ROWS)]


def write_prices(root: Path, held: Sequence[Standing]) -> None:
    """Write the table of the store at ``root``, at once or not at all; `OSError` if it cannot be written."""
    rows = [_Row(bytes.fromhex(chunk.key), chunk.price, chunk.workload) for chunk in held[:MOST_ROWS]]
    table = msgspec.msgpack.encode(_Table(FORMAT, rows))
    target = root / PRICES_NAME
    with temporary_file(target) as (fd, path):
        write_all(fd, xxhash.xxh3_128_digest(table) + table)
        os.replace(path, target)


def read_prices(root: Path) -> list[Standing] | None:
    """The table of the store at ``root``, the dearest chunk first; None, and a warning, if it cannot be used."""
    path = root / PRICES_NAME
    for leftover in root.glob(f".{path.stem}.*.tmp"):
        delete_leftover(leftover)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES or xxhash.xxh3_128_digest(data[_DIGEST:]) != data[:_DIGEST]:
            raise ValueError("it is damaged")
        table = msgspec.msgpack.decode(data[_DIGEST:], type=_Table)
        if table.format != FORMAT or not all(math.isfinite(row.price) for row in table.rows):
            raise ValueError("another version wrote it")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        _log.warning("the prices in %s are not used (%s): chunks come to memory by their last use", path, error)
        return None
    held = [Standing(row.key.hex(), row.price, row.workload) for row in table.rows]
    return sorted(held, key=lambda chunk: -chunk.price)


def drop_prices(root: Path) -> None:
    """There are no prices any more."""
    (root / PRICES_NAME).unlink(missing_ok=True)
