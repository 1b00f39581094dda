"""The tables of a store's index, and how an older index becomes one of today.

Format 2 added tenants, with what each holds carried along by triggers, and what the store remembers of
itself. An older index is upgraded when it is opened, in one transaction: as it was, or of today, whatever happens.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from blendkv.errors import InputError, StoreMismatchError

FORMAT = 2
_APPLICATION_ID = 0x424B5631  # "BKV1", in the database's header: tells our index from any other SQLite file
_MARKS = ("application_id", "user_version")
_FORMAT_1 = (
    """CREATE TABLE chunks (
    key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, recipe TEXT NOT NULL, token_ids BLOB NOT NULL,
    tokens INTEGER NOT NULL, nbytes INTEGER NOT NULL, file_bytes INTEGER NOT NULL, path TEXT NOT NULL,
    created REAL NOT NULL, last_used REAL NOT NULL, tick INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0
)""",
    "CREATE INDEX by_tick ON chunks (tick)",
    "CREATE INDEX by_pin ON chunks (pinned, file_bytes)",
    "CREATE TABLE clock (tick INTEGER NOT NULL)",
    "INSERT INTO clock VALUES (0)",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    "PRAGMA user_version = 1",
)
_TO_FORMAT_2 = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    """CREATE TABLE tenants (
    id INTEGER PRIMARY KEY, tag TEXT NOT NULL UNIQUE,
    chunks INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0
)""",
    "ALTER TABLE chunks ADD COLUMN tenant INTEGER NOT NULL DEFAULT 0",
    # All that is there is nobody's: the tag is empty, the id 0.
    "INSERT INTO tenants SELECT 0, '', COUNT(*), COALESCE(SUM(file_bytes), 0) FROM chunks",
    "CREATE INDEX by_tenant ON chunks (tenant, tick, file_bytes)",
    # In the database, not in this program: a process of the last release that has it open counts along.
    """CREATE TRIGGER chunk_added AFTER INSERT ON chunks BEGIN
    UPDATE tenants SET chunks = chunks + 1, bytes = bytes + NEW.file_bytes WHERE id = NEW.tenant;
END""",
    """CREATE TRIGGER chunk_removed AFTER DELETE ON chunks BEGIN
    UPDATE tenants SET chunks = chunks - 1, bytes = bytes - OLD.file_bytes WHERE id = OLD.tenant;
    DELETE FROM tenants WHERE id = OLD.tenant AND id > 0 AND chunks <= 0;
END""",
    "PRAGMA user_version = 2",
)


def prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables, or bring those of an older version up to date.

    ``connection`` is in autocommit mode.

    Raises
    ------
    StoreMismatchError
        If a newer version of BlendKV made them.
    InputError
        If the file is a database of something else.
    """
    if _version(connection, path) == 0:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    try:
        version = _version(connection, path)  # another process may have been faster
        for statement in (*(_FORMAT_1 if version < 1 else ()), *(_TO_FORMAT_2 if version < 2 else ())):
            connection.execute(statement)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The format of what is there; 0 for an empty file."""
    application, version = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _MARKS)
    if application == 0 and connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0:
        return 0
    if application != _APPLICATION_ID:
        raise InputError(f"{path} is a database of another program; give the store a directory of its own")
    if version > FORMAT:
        raise StoreMismatchError(
            f"the store at {path.parent} has format {version}; up to {FORMAT} can be used: upgrade blendkv"
        )
    return int(version)
