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
from pathlib import Path
from typing import NamedTuple

from blendkv.errors import StoreError
from blendkv.store.base import IndexEntry
from blendkv.store.cells import Cells, PlainCells
from blendkv.store.schema import prepare
from blendkv.store.usage import CodecUsage
from blendkv.types import Recipe, TokenIds, as_token_ids

_LOCK_TIMEOUT = 30.0  # seconds to wait for another process's write
_TOUCH_BATCH = 1024
_KEYS_PER_QUERY = 512
_NEVER = (1 << 63) - 1
"""A tick that no clock comes to."""
_OF_TAG = "(SELECT id FROM tenants WHERE tag = ?)"
_WRONG = """
WITH counted AS (
    SELECT tenants.id AS id, COUNT(chunks.tenant) AS chunks, COALESCE(SUM(file_bytes), 0) AS bytes
    FROM tenants LEFT JOIN chunks ON chunks.tenant = tenants.id GROUP BY tenants.id
)
SELECT counted.chunks, counted.bytes, tenants.id FROM tenants JOIN counted ON counted.id = tenants.id
WHERE counted.chunks <> tenants.chunks OR counted.bytes <> tenants.bytes
"""
_COLUMNS = "key, fingerprint, recipe, token_ids, nbytes, file_bytes, path, created, last_used, pinned"
_STANDING = "tick, key, tokens, nbytes, file_bytes, last_used"

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


class Placed(NamedTuple):
    """Where a chunk stands in the order of use, the later used, the larger the tick; sizes and times as in `Row`."""

    tick: int
    key: str
    tokens: int
    nbytes: int
    file_bytes: int
    last_used: float


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
        self.cells: Cells = PlainCells()
        """How token ids and recipes are kept; an encrypted store's are set when it is opened."""
        self.usage = CodecUsage(path, lambda text: self.cells.recipe(text))
        """What its chunks take by codec."""
        self._touched: dict[str, float] = {}
        self._touch_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._owner: int | None = None  # the thread in a transaction
        self._read_lock = threading.Lock()
        self._touch_failed = False
        with self._errors():
            self._writer = self._connect()
            try:
                prepare(self._writer, path)
                self._reader = self._connect()
            except BaseException:
                self._writer.close()
                raise

    def row(self, key: str) -> Row | None:
        """The row of ``key``, or None."""
        found = self._read(f"SELECT {_COLUMNS} FROM chunks WHERE key = ?", (key,))
        return self._row(found[0]) if found else None

    def place(self, key: str) -> tuple[str, int] | None:
        """Path and bytes of the file of ``key``, or None; opens nothing that may be sealed."""
        found = self._read("SELECT path, file_bytes FROM chunks WHERE key = ?", (key,))
        return found[0] if found else None

    def rows(self) -> list[Row]:
        """All rows, least recently used first."""
        return [self._row(values) for values in self._read(f"SELECT {_COLUMNS} FROM chunks ORDER BY tick")]

    def keys(self, leading: str = "", *, tenant: str | None = None) -> set[str]:
        """The keys of all rows, or of those that begin with ``leading``, or are the tenant's of that tag."""
        if tenant is not None:
            return {key for (key,) in self._read(f"SELECT key FROM chunks WHERE tenant = {_OF_TAG}", (tenant,))}
        query, last = "SELECT key FROM chunks WHERE key >= ? AND key < ?", leading + "g"  # behind all hex digits
        return {key for (key,) in self._read(query, (leading, last))}

    def version(self) -> int:
        """A number that differs from the last one if any connection, of any process, has written since."""
        return int(self._read("PRAGMA data_version")[0][0])

    def count(self, tenant: str | None = None) -> int:
        """Number of chunks, of all or of the tenant of that tag."""
        return self.totals(tenant)[0]

    def entries(self, keys: Sequence[str]) -> list[IndexEntry]:
        """The entries of those of ``keys`` that are there, in no order."""
        found: list[IndexEntry] = []
        for first in range(0, len(keys), _KEYS_PER_QUERY):
            some = tuple(keys[first : first + _KEYS_PER_QUERY])
            marks = ",".join("?" * len(some))
            rows = self._read(f"SELECT key, fingerprint, recipe, token_ids FROM chunks WHERE key IN ({marks})", some)
            found += [
                IndexEntry(key, model, self.cells.recipe(recipe), self.cells.ids(key, ids))
                for key, model, recipe, ids in rows
            ]
        return found

    def totals(self, tenant: str | None = None) -> tuple[int, int]:
        """Number of chunks, and bytes of their files, of all or of one tenant: sums that the database carries along."""
        query = "SELECT COALESCE(SUM(chunks), 0), COALESCE(SUM(bytes), 0) FROM tenants"
        found = self._read(query) if tenant is None else self._read(f"{query} WHERE tag = ?", (tenant,))
        chunks, size = found[0]
        return chunks, size

    def tenants(self) -> list[tuple[str, int, int]]:
        """(tag, chunks, bytes of their files) of every tenant that has any, and of nobody's chunks (an empty tag)."""
        return self._read("SELECT tag, chunks, bytes FROM tenants WHERE chunks > 0 ORDER BY tag")

    def recount(self) -> int:
        """Count what each tenant has, and mend the sums; return how many were wrong. Call it in a transaction."""
        wrong = self._writer.execute(_WRONG).fetchall()
        self._writer.executemany("UPDATE tenants SET chunks = ?, bytes = ? WHERE id = ?", wrong)
        return len(wrong)

    def oldest(self, nbytes: int, tenant: str | None = None) -> list[str]:
        """Keys that are not pinned, least recently used first, of ``nbytes`` bytes together or all there are.

        Of all chunks, or of one tenant's. Call it in a transaction.
        """
        keys, found = [], 0
        query = "SELECT key, file_bytes FROM chunks INDEXED BY by_tick WHERE pinned = 0 ORDER BY tick"
        if tenant is not None:
            query = (
                "SELECT key, file_bytes FROM chunks INDEXED BY by_tenant "
                f"WHERE tenant = {_OF_TAG} AND pinned = 0 ORDER BY tick"
            )
        with closing(self._writer.execute(query, () if tenant is None else (tenant,))) as rows:
            while found < nbytes and (row := rows.fetchone()) is not None:
                keys.append(row[0])
                found += row[1]
        return keys

    def window(self, after: int, nbytes: int, least: int, tenant: str | None = None) -> list[Placed]:
        """What was used after the tick ``after`` and is not pinned, least recently used first; no more rows are read.

        Chunks of ``nbytes`` bytes together, ``least`` of them at least, or all there are. Of all chunks, or of one
        tenant's. Call it in a transaction.
        """
        found: list[Placed] = []
        size = 0
        query = "INDEXED BY by_tick WHERE"
        values: tuple[object, ...] = (after,)
        if tenant is not None:
            query, values = f"INDEXED BY by_tenant WHERE tenant = {_OF_TAG} AND", (tenant, after)
        query = f"SELECT {_STANDING} FROM chunks {query} tick > ? AND pinned = 0 ORDER BY tick"
        with closing(self._writer.execute(query, values)) as rows:
            while (size < nbytes or len(found) < least) and (row := rows.fetchone()) is not None:
                found.append(Placed(*row))
                size += found[-1].file_bytes
        return found

    def span(self, tenant: str | None = None) -> tuple[int, int]:
        """The ticks of what was used longest ago and last, of all chunks or of one tenant's; zeros where none is."""
        of, values = ("", ()) if tenant is None else (f" WHERE tenant = {_OF_TAG}", (tenant, tenant))
        ends = ", ".join(f"(SELECT COALESCE({end}(tick), 0) FROM chunks{of})" for end in ("MIN", "MAX"))
        first, last = self._read(f"SELECT {ends}", values)[0]
        return first, last

    def standing(self, keys: Sequence[str], tenant: str | None = None) -> list[Placed]:
        """Those of ``keys``, 512 at most, that are there, not pinned, and the tenant's if one is given."""
        marks = ",".join("?" * len(keys))
        query, values = f"SELECT {_STANDING} FROM chunks WHERE key IN ({marks}) AND pinned = 0", tuple(keys)
        if tenant is not None:
            query, values = f"{query} AND tenant = {_OF_TAG}", (*values, tenant)
        return [Placed(*row) for row in self._read(query, values)]

    def newest(self, count: int, before: int | None = None) -> list[Placed]:
        """The ``count`` chunks that were used last, of all or before the tick ``before``, the last first."""
        query = f"SELECT {_STANDING} FROM chunks WHERE tick < ? ORDER BY tick DESC LIMIT ?"
        return [Placed(*row) for row in self._read(query, (_NEVER if before is None else before, count))]

    def pinned(self) -> dict[str, int]:
        """Key -> bytes of the file, of every pinned chunk."""
        return dict(self._read("SELECT key, file_bytes FROM chunks WHERE pinned = 1"))

    def pinned_bytes(self, tenant: str) -> int:
        """Bytes of the files of a tenant's pinned chunks."""
        # Few are pinned; left to choose, SQLite would look at all that the tenant has.
        query = (
            f"SELECT COALESCE(SUM(file_bytes), 0) FROM chunks INDEXED BY by_pin WHERE pinned = 1 AND tenant = {_OF_TAG}"
        )
        return int(self._read(query, (tenant,))[0][0])

    def changed_since(self, tick: int, tenant: str | None = None) -> list[tuple[str, int, int]]:
        """(key, bytes of the file, tick) of what was added or used after ``tick`` by any process, oldest first.

        Of all chunks, or of one tenant's.
        """
        if tenant is None:
            return self._read("SELECT key, file_bytes, tick FROM chunks WHERE tick > ? ORDER BY tick", (tick,))
        query = f"SELECT key, file_bytes, tick FROM chunks WHERE tenant = {_OF_TAG} AND tick > ? ORDER BY tick"
        return self._read(query, (tenant, tick))

    def get_meta(self, name: str) -> str | None:
        """What the store remembers of itself under ``name``."""
        found = self._read("SELECT value FROM meta WHERE name = ?", (name,))
        return str(found[0][0]) if found else None

    def set_meta(self, name: str, value: str) -> None:
        """Remember ``value``. Call it in a transaction."""
        self._writer.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

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
                for step in reversed(undo):
                    step()
                if self._writer.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._writer.execute("ROLLBACK")
                raise
            finally:
                self._owner = None

    def insert(self, row: Row) -> None:
        """Add a row as the most recently used one. Call it in a transaction."""
        tenant = row.recipe.tenant
        content = self.cells.recipe_text(row.recipe), self.cells.ids_blob(row.key, row.token_ids)
        self._writer.execute("INSERT INTO tenants (tag) VALUES (?) ON CONFLICT (tag) DO NOTHING", (tenant,))
        values = (
            *(row.key, row.fingerprint, *content),
            *(len(row.token_ids), row.nbytes, row.file_bytes, row.path, row.created, row.last_used, self._next_tick()),
            tenant,
        )
        self._writer.execute(
            "INSERT INTO chunks (key, fingerprint, recipe, token_ids, tokens, nbytes, file_bytes, path, created, "
            f"last_used, tick, tenant) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {_OF_TAG})",
            values,
        )

    def delete(self, key: str) -> bool:
        """Drop a row; return whether it was there. Call it in a transaction."""
        return self._writer.execute("DELETE FROM chunks WHERE key = ?", (key,)).rowcount > 0

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

    def _row(self, values: tuple) -> Row:
        key, fingerprint, recipe, token_ids, nbytes, file_bytes, path, created, last_used, pinned = values
        ids = as_token_ids(self.cells.ids(key, token_ids))
        sizes_and_times = (nbytes, file_bytes, path, created, last_used)
        return Row(key, fingerprint, self.cells.recipe(recipe), ids, *sizes_and_times, bool(pinned))
