"""The SQLite file behind a collection: opening, transactions, and errors in plain words."""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blendkv.errors import InputError, StoreError, StoreFullError, StoreMismatchError

FORMAT = 1
"""Version of the schema. A newer one is refused."""

FILE_NAME = "collection.sqlite"

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    row INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    digest TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE chunks (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    document INTEGER NOT NULL REFERENCES documents (row) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    metadata TEXT NOT NULL,
    embedding BLOB,
    UNIQUE (document, position)
);
CREATE INDEX chunks_not_embedded ON chunks (row) WHERE embedding IS NULL;
"""


class Database:
    """One connection, shared by threads under a lock; other processes are kept apart by SQLite (WAL).

    Raises
    ------
    StoreMismatchError
        If the file was made by a newer version, or is another program's.
    StoreError
        If it cannot be opened, or is no database.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._lock = threading.RLock()
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: not a folder; a collection is kept in a folder: name another path")
        with self._explained():
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        if self.rows("PRAGMA journal_mode")[0][0] != "wal":
            self.rows("PRAGMA journal_mode = WAL")
        # In WAL mode this survives the death of the process; after a power cut the last commits may be missing.
        self.rows("PRAGMA synchronous = NORMAL")
        self.rows("PRAGMA foreign_keys = ON")
        with self.transaction():
            tables = {name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self.rows(statement)
                first = [("format", str(FORMAT)), ("generation", "0"), ("identity", f'"{secrets.token_hex(6)}"')]
                for pair in first:
                    self.rows("INSERT INTO meta VALUES (?, ?)", pair)
            elif not {"meta", "documents", "chunks"} <= tables:
                raise StoreMismatchError(f"{self.path}: not made by BlendKV; name another store folder")
        found = int(self.rows("SELECT value FROM meta WHERE key = 'format'")[0][0])
        if found > FORMAT:
            raise StoreMismatchError(
                f"{self.path}: format {found}; this version reads up to {FORMAT}: upgrade blendkv or name another store"
            )

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run one statement and return all its rows."""
        with self._lock, self._explained():
            return self._connection.execute(sql, values).fetchall()

    def change(self, sql: str, values: Sequence[Any] = ()) -> tuple[int, int]:
        """Run one writing statement; return the number of rows touched and the last row id."""
        with self._lock, self._explained():
            cursor = self._connection.execute(sql, values)
            return cursor.rowcount, cursor.lastrowid or 0

    def change_many(self, sql: str, values: Iterator[Sequence[Any]] | Sequence[Sequence[Any]]) -> int:
        """Run one writing statement for many sets of values; return the number of rows touched."""
        with self._lock, self._explained():
            return self._connection.executemany(sql, values).rowcount

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside happen, or none."""
        with self._lock:
            self.rows("BEGIN IMMEDIATE")
            try:
                yield
                self.rows("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.rollback()
                raise

    def close(self) -> None:
        """Close the connection; using it afterwards raises ``StoreError``."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise StoreFullError(f"{self.path}: the disk is full; free some room and run again") from error
            raise StoreError(f"{self.path}: {error}; check its folder's rights and who else uses it") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.path}: {error}; if it is damaged, remove it and ingest again") from error
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}; check the path and its rights") from error
