"""A store as the last release wrote it: upgraded in place, at once or not at all."""

from __future__ import annotations

import sqlite3
import tarfile
from pathlib import Path

import pytest

from blendkv.store import KVStore
from blendkv.store import schema as schema_module
from blendkv.store.index import Index

ARCHIVE = Path(__file__).with_name("data") / "format_1.tar.xz"
"""Three chunks of the factory (0 to 2), put by version 0.1.0; 1 is pinned, 0 was used last."""


@pytest.fixture
def old(tmp_path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path / "s", filter="data")
    return tmp_path / "s"


def version(root):
    connection = sqlite3.connect(root / "index.sqlite")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.close()
    return found


def test_nothing_is_lost(old, make_kv, assert_holds):
    assert version(old) == 1
    with KVStore.open(old, memory_bytes=0) as store:
        assert not store.repair
        assert [info.key for info in store.ls()] == [make_kv(number).key for number in (1, 2, 0)]
        assert [info.pinned for info in store.ls()] == [True, False, False]
        for number in range(3):
            assert_holds(store, make_kv(number))
        (use,) = store.stat().tenants
        size = sum(file.stat().st_size for file in old.rglob("*.safetensors"))
        assert (use.tag, use.chunks, use.disk_bytes) == ("", 3, size)
        store.put(make_kv(3, tenant="a" * 32))
        store.remove(make_kv(2).key)
        assert [(use.tag, use.chunks) for use in store.stat().tenants] == [("", 2), ("a" * 32, 1)]
    assert version(old) == 2
    with KVStore.open(old, memory_bytes=0) as store:
        assert not store.repair
        assert_holds(store, make_kv(3, tenant="a" * 32))


def test_a_failure_at_any_statement_leaves_the_old_index(old, make_kv, assert_holds, monkeypatch):
    steps = schema_module._TO_FORMAT_2
    for cut in range(len(steps)):
        with monkeypatch.context() as patch:
            patch.setattr(schema_module, "_TO_FORMAT_2", (*steps[:cut], "SELECT * FROM nowhere", *steps[cut:]))
            with pytest.raises(Exception, match="no such table: nowhere"):
                KVStore.open(old, memory_bytes=0)
        assert version(old) == 1
    with KVStore.open(old, memory_bytes=0) as store:
        assert_holds(store, make_kv(1))


def test_a_process_of_the_last_release_that_has_it_open_counts_along(old, make_kv):
    """What it writes is nobody's, and in the sums: they are kept by triggers of the database."""
    last = sqlite3.connect(old / "index.sqlite", isolation_level=None)
    last.execute("SELECT COUNT(*) FROM chunks").fetchone()
    index = Index(old / "index.sqlite")
    before = index.totals()
    last.execute(
        "INSERT INTO chunks (key, fingerprint, recipe, token_ids, tokens, nbytes, file_bytes, path, created, "
        "last_used, tick) VALUES ('k', 'f', '{}', x'', 0, 1, 500, 'p', 0, 0, 99)"
    )
    assert index.totals() == (before[0] + 1, before[1] + 500)
    last.execute("DELETE FROM chunks WHERE key = 'k'")
    assert index.totals() == before
    last.close()
    index.close()


def test_a_new_index_is_what_an_upgraded_one_is(old, tmp_path):
    def tables(path):
        Index(path).close()
        connection = sqlite3.connect(path)
        found = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        connection.close()
        return found

    assert tables(old / "index.sqlite") == tables(tmp_path / "new.sqlite")


def test_sums_that_are_wrong_are_mended_when_the_store_is_opened(old, make_kv):
    with KVStore.open(old, memory_bytes=0) as store:
        store.put(make_kv(5, tenant="a" * 32))
        expected = store.stat().tenants
    connection = sqlite3.connect(old / "index.sqlite")
    connection.execute("UPDATE tenants SET bytes = bytes + 7, chunks = 99 WHERE id > 0")
    connection.commit()
    connection.close()
    with KVStore.open(old, memory_bytes=0) as store:
        assert store.repair.recounted == 1
        assert "1 tenants counted anew" in str(store.repair)
        assert store.stat().tenants == expected
        assert not store.gc().repair
