"""The index of a store: SQLite in WAL mode, the truth about what is where. Shared by threads and processes."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from blendkv.errors import InputError, StoreError, StoreMismatchError
from blendkv.store.base import IndexEntry
from blendkv.store.chunkfile import recipe_from_json, recipe_to_json
from blendkv.store.usage import CodecUsage
from blendkv.types import Recipe, TokenIds, as_token_ids

FORMAT = 1
_APPLICATION_ID = 0x424B5631  # "BKV1", in the database's header: tells our index from any other SQLite file
_LOCK_TIMEOUT = 30.0  # seconds to wait for another process's write
_TOUCH_BATCH = 1024
_KEYS_PER_QUERY = 512
_SCHEMA = f"""
CREATE TABLE chunks (
    key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, recipe TEXT NOT NULL, token_ids BLOB NOT NULL,
    tokens INTEGER NOT NULL, nbytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL, path TEXT NOT NULL,
    created REAL NOT NULL, last_used REAL NOT NULL, tick INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_tick ON chunks (tick);
CREATE INDEX by_pin ON chunks (pinned, file_bytes);
CREATE TABLE clock (tick INTEGER NOT NULL);
INSERT INTO clock VALUES (0);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {FORMAT};
"""
_COLUMNS = "key, fingerprint, recipe, token_ids, nbytes, file_bytes, path, created, last_used, pinned"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One chunk KV on disk. Sizes in bytes, times in seconds since the epoch, ``path`` relative to the store."""

    key: str
    fingerprint: str
    recipe: Recipe
    token_ids: TokenIds
    nbytes: int
    file_bytes: int
    path: str
    created: float
    last_used: float
    pinned: bool = False


class Index:
    """Rows by key. Opening creates the database, or refuses one that is not ours.

    Reads go through a connection of their own: in WAL mode they never wait for a write or its fsync.
    ``synchronous=NORMAL`` may lose the last commits in a power failure, never the database; files are fsynced before
    their row is written, and a file without a row is adopted when the store is opened.

    Raises
    ------
    StoreMismatchError
        If a newer version of BlendKV made the index.
    InputError
        If the file is a database of something else.
    StoreError
        If it cannot be opened, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.usage = CodecUsage(path)
        """What its chunks take by codec."""
        self._touched: dict[str, float] = {}
        self._touch_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._owner: int | None = None  # the thread in a transaction
        self._read_lock = threading.Lock()
        self._touch_failed = False
        self._tally: tuple[int, int, int] | None = None  # (data version, chunks, bytes)
        with self._errors():
            self._writer = self._connect()
            try:
                self._prepare()
                self._reader = self._connect()
            except BaseException:
                self._writer.close()
                raise

    def row(self, key: str) -> Row | None:
        """The row of ``key``, or None."""
        found = self._read(f"SELECT {_COLUMNS} FROM chunks WHERE key = ?", (key,))
        return _row(found[0]) if found else None

    def rows(self) -> list[Row]:
        """All rows, least recently used first."""
        return [_row(values) for values in self._read(f"SELECT {_COLUMNS} FROM chunks ORDER BY tick")]

    def keys(self, leading: str = "") -> set[str]:
        """The keys of all rows, or of those that begin with ``leading``."""
        query, last = "SELECT key FROM chunks WHERE key >= ? AND key < ?", leading + "g"  # behind all hex digits
        return {key for (key,) in self._read(query, (leading, last))}

    def version(self) -> int:
        """A number that differs from the last one if any connection, of any process, has written since."""
        return int(self._read("PRAGMA data_version")[0][0])

    def count(self) -> int:
        """Number of chunks; SQLite counts the leaves of a tree, not the rows."""
        return int(self._read("SELECT COUNT(*) FROM chunks")[0][0])

    def entries(self, keys: Sequence[str]) -> list[IndexEntry]:
        """The entries of those of ``keys`` that are there, in no order."""
        found: list[IndexEntry] = []
        for first in range(0, len(keys), _KEYS_PER_QUERY):
            some = tuple(keys[first : first + _KEYS_PER_QUERY])
            marks = ",".join("?" * len(some))
            rows = self._read(f"SELECT key, fingerprint, recipe, token_ids FROM chunks WHERE key IN ({marks})", some)
            found += [IndexEntry(key, model, _recipe(recipe), _view(ids)) for key, model, recipe, ids in rows]
        return found

    def totals(self) -> tuple[int, int]:
        """Number of chunks, and bytes of their files.

        In a transaction the sums are carried on from the last one, unless another process has written since: each put
        asks for them, and to count a million rows takes tens of milliseconds.
        """
        query = "SELECT COUNT(*), COALESCE(SUM(file_bytes), 0) FROM chunks"
        if self._owner != threading.get_ident():
            return self._read(query)[0]
        version = int(self._read("PRAGMA data_version")[0][0])
        if self._tally is None or self._tally[0] != version:
            self._tally = version, *self._read(query)[0]
        return self._tally[1:]

    def oldest(self, nbytes: int) -> list[str]:
        """Keys that are not pinned, least recently used first, of ``nbytes`` bytes together or all there are.

        Call it in a transaction.
        """
        keys, found = [], 0
        query = "SELECT key, file_bytes FROM chunks INDEXED BY by_tick WHERE pinned = 0 ORDER BY tick"
        with closing(self._writer.execute(query)) as rows:
            while found < nbytes and (row := rows.fetchone()) is not None:
                keys.append(row[0])
                found += row[1]
        return keys

    def pinned(self) -> dict[str, int]:
        """Key -> bytes of the file, of every pinned chunk."""
        return dict(self._read("SELECT key, file_bytes FROM chunks WHERE pinned = 1"))

    def changed_since(self, tick: int) -> list[tuple[str, int, int]]:
        """(key, bytes of the file, tick) of what was added or used after ``tick`` by any process, oldest first."""
        return self._read("SELECT key, file_bytes, tick FROM chunks WHERE tick > ? ORDER BY tick", (tick,))

    @contextmanager
    def transaction(self) -> Iterator[list[Callable[[], None]]]:
        """Hold the write lock of the database, between threads and processes; commit at the end.

        Yields a list for undo steps: if the transaction fails they run, last first, before the lock is let go.

        Raises
        ------
        OSError
            ENOSPC, if the device has no room for the change.
        StoreError
            If another process holds the lock too long, or the database is damaged.
        """
        undo: list[Callable[[], None]] = []
        with self._write_lock, self._errors():
            self._writer.execute("BEGIN IMMEDIATE")
            self._owner = threading.get_ident()
            try:
                yield undo
                self._writer.execute("COMMIT")
            except BaseException:
                self._tally = None
                for step in reversed(undo):
                    step()
                if self._writer.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._writer.execute("ROLLBACK")
                raise
            finally:
                self._owner = None

    def insert(self, row: Row) -> None:
        """Add a row as the most recently used one. Call it in a transaction."""
        values = (
            *(row.key, row.fingerprint, recipe_to_json(row.recipe), row.token_ids.astype("<i4").tobytes()),
            *(len(row.token_ids), row.nbytes, row.file_bytes, row.path, row.created, row.last_used, self._next_tick()),
        )
        self._writer.execute(
            "INSERT INTO chunks (key, fingerprint, recipe, token_ids, tokens, nbytes, file_bytes, path, created, "
            "last_used, tick) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        self._add(1, row.file_bytes)

    def delete(self, key: str) -> bool:
        """Drop a row; return whether it was there. Call it in a transaction."""
        gone = self._writer.execute("DELETE FROM chunks WHERE key = ? RETURNING file_bytes", (key,)).fetchall()
        for (size,) in gone:
            self._add(-1, -size)
        return bool(gone)

    def set_pinned(self, keys: Iterable[str], pinned: bool) -> None:
        """Pin or unpin ``keys``. Call it in a transaction."""
        self._writer.executemany("UPDATE chunks SET pinned = ? WHERE key = ?", [(int(pinned), key) for key in keys])

    def touch(self, key: str) -> None:
        """Note a use of ``key``: in memory at first, written in batches, so that a hit costs no write."""
        with self._touch_lock:
            self._touched.pop(key, None)
            self._touched[key] = time.time()
            due = len(self._touched) >= _TOUCH_BATCH
        if due:
            self.flush_touches()

    def apply_touches(self) -> None:
        """Write the noted uses. Call it in a transaction."""
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        for key, when in touched.items():
            self._writer.execute(
                "UPDATE chunks SET last_used = ?, tick = ? WHERE key = ?", (when, self._next_tick(), key)
            )

    def flush_touches(self) -> None:
        """Write the noted uses now. Best effort: a read must not fail because its time cannot be written."""
        if not self._touched:
            return
        try:
            with self.transaction():
                self.apply_touches()
        except (OSError, StoreError) as error:
            if not self._touch_failed:
                _log.warning("the order of use is not up to date in %s: %s", self._path, error)
            self._touch_failed = True

    def close(self) -> None:
        """Write the noted uses and close."""
        self.flush_touches()
        with self._write_lock, self._read_lock:
            self._reader.close()
            self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, timeout=_LOCK_TIMEOUT, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _prepare(self) -> None:
        application = self._writer.execute("PRAGMA application_id").fetchone()[0]
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        tables = self._writer.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if application == 0 and tables == 0:
            self._writer.execute("PRAGMA journal_mode = WAL")
            self._writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        elif application != _APPLICATION_ID:
            raise InputError(f"{self._path} is a database of another program; give the store a directory of its own")
        elif version > FORMAT:
            raise StoreMismatchError(
                f"the store at {self._path.parent} has format {version}; up to {FORMAT} can be used: upgrade blendkv"
            )

    def _add(self, chunks: int, size: int) -> None:
        if self._tally is not None:
            self._tally = self._tally[0], self._tally[1] + chunks, self._tally[2] + size

    def _next_tick(self) -> int:
        self._writer.execute("UPDATE clock SET tick = tick + 1")
        return int(self._writer.execute("SELECT tick FROM clock").fetchone()[0])

    def _read(self, query: str, values: tuple[object, ...] = ()) -> list[tuple]:
        # Inside a transaction of this thread, its own changes must be seen.
        if self._owner == threading.get_ident():
            with self._errors():
                return self._writer.execute(query, values).fetchall()
        with self._read_lock, self._errors():
            return self._reader.execute(query, values).fetchall()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, f"no space for the index {self._path}") from error
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise StoreError(
                    f"the index {self._path} is damaged ({error}); move it away and open the store again: "
                    "it is rebuilt from the chunk files"
                ) from error
            raise StoreError(
                f"the index {self._path} cannot be used ({error}); check the directory's rights"
            ) from error


def _row(values: tuple) -> Row:
    key, fingerprint, recipe, token_ids, nbytes, file_bytes, path, created, last_used, pinned = values
    return Row(
        *(
            key,
            fingerprint,
            _recipe(recipe),
            as_token_ids(_view(token_ids)),
            nbytes,
            file_bytes,
            path,
            created,
            last_used,
        ),
        bool(pinned),
    )


def _view(blob: bytes) -> TokenIds:
    """Token ids in the memory of ``blob``: read-only, because bytes are."""
    return np.frombuffer(blob, dtype="<i4").astype(np.int32, copy=False)


@lru_cache(maxsize=1024)  # many chunks, few recipes
def _recipe(text: str) -> Recipe:
    return recipe_from_json(text)
