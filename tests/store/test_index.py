"""The index: what it refuses, what a failed transaction leaves, and what a hit costs."""

from __future__ import annotations

import random
import sqlite3

import numpy as np
import pytest

from blendkv.errors import InputError, StoreError, StoreMismatchError
from blendkv.store import KVStore
from blendkv.store import index as index_module
from blendkv.store.index import Index, Row


@pytest.fixture
def index(tmp_path):
    index = Index(tmp_path / "index.sqlite")
    yield index
    index.close()


def add(index, kv, size=100):
    with index.transaction():
        index.insert(Row(kv.key, kv.fingerprint, kv.recipe, kv.token_ids, kv.nbytes, size, "p", 1.0, 2.0))


def test_rows_come_back_as_they_went(index, make_kv):
    kv = make_kv(1)
    add(index, kv)
    row = index.row(kv.key)
    assert (row.fingerprint, row.recipe, row.nbytes, row.file_bytes) == (kv.fingerprint, kv.recipe, kv.nbytes, 100)
    assert (row.path, row.created, row.last_used, row.pinned) == ("p", 1.0, 2.0, False)
    assert row.token_ids.dtype == np.int32
    assert np.array_equal(row.token_ids, kv.token_ids)
    assert index.row("0" * 64) is None
    assert index.totals() == (1, 100)


def test_a_failed_transaction_leaves_nothing_and_undoes_the_rest(index, make_kv):
    kv, done = make_kv(1), []

    def attempt():
        with index.transaction() as undo:
            undo.append(lambda: done.append("first"))
            undo.append(lambda: done.append("second"))
            index.insert(Row(kv.key, kv.fingerprint, kv.recipe, kv.token_ids, 1, 1, "p", 0.0, 0.0))
            assert index.row(kv.key) is not None  # a transaction sees its own changes
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        attempt()
    assert done == ["second", "first"]
    assert index.row(kv.key) is None
    add(index, kv)
    assert index.row(kv.key) is not None


def test_hits_are_written_in_batches(index, make_kv, monkeypatch):
    monkeypatch.setattr(index_module, "_TOUCH_BATCH", 3)
    kvs = [make_kv(number) for number in range(4)]
    for kv in kvs:
        add(index, kv)

    def order():
        return [row.key for row in index.rows()]

    index.touch(kvs[1].key)
    index.touch(kvs[0].key)
    assert order() == [kv.key for kv in kvs]
    index.touch(kvs[2].key)
    assert order() == [kvs[number].key for number in (3, 1, 0, 2)]
    index.touch(kvs[3].key)
    index.flush_touches()
    assert order() == [kvs[number].key for number in (1, 0, 2, 3)]
    assert index.row(kvs[3].key).last_used > 2.0


def test_another_process_sees_uses_and_additions(index, make_kv):
    kvs = [make_kv(number) for number in range(3)]
    other = Index(index._path)
    for kv in kvs:
        add(index, kv)
    changes = other.changed_since(0)
    assert [key for key, _, _ in changes] == [kv.key for kv in kvs]
    index.touch(kvs[0].key)
    index.flush_touches()
    assert [key for key, _, _ in other.changed_since(changes[-1][2])] == [kvs[0].key]
    # A tick is never given twice, even if the row that had it is gone.
    seen = other.changed_since(0)[-1][2]
    with index.transaction():
        index.delete(kvs[0].key)
    add(index, kvs[0])
    assert [key for key, _, _ in other.changed_since(seen)] == [kvs[0].key]
    other.close()


def test_a_newer_store_is_refused(tmp_path, make_kv):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(make_kv(1))
    database = sqlite3.connect(tmp_path / "s" / "index.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreMismatchError, match=r"format 99; up to 2 can be used: upgrade blendkv"):
        KVStore.open(tmp_path / "s", memory_bytes=0)
    assert len(list((tmp_path / "s").glob("kv/*/*.safetensors"))) == 1


def test_a_database_of_something_else_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    database = sqlite3.connect(tmp_path / "s" / "index.sqlite")
    database.execute("CREATE TABLE accounts (id)")
    database.close()
    with pytest.raises(InputError, match="database of another program"):
        KVStore.open(tmp_path / "s", memory_bytes=0)


def test_a_damaged_index_says_what_to_do_and_is_rebuilt(tmp_path, make_kv, assert_holds):
    path = tmp_path / "s"
    kvs = [make_kv(number) for number in range(5)]
    with KVStore.open(path, memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
    index = path / "index.sqlite"
    index.write_bytes(b"x" * index.stat().st_size)
    with pytest.raises(StoreError, match=r"is damaged .* move it away and open the store again: it is rebuilt"):
        KVStore.open(path, memory_bytes=0)
    index.rename(tmp_path / "away")
    with KVStore.open(path, memory_bytes=0) as store:
        assert store.repair.adopted == 5
        for kv in kvs:
            assert_holds(store, kv)


def test_a_locked_index_is_a_store_error(index, make_kv, monkeypatch):
    monkeypatch.setattr(index_module, "_LOCK_TIMEOUT", 0.01)
    other = Index(index._path)
    with index.transaction(), pytest.raises(StoreError, match="database is locked"):
        add(other, make_kv(1))
    add(other, make_kv(1))
    other.close()


def test_a_use_that_cannot_be_written_is_logged_once_and_fails_nothing(index, make_kv, caplog, monkeypatch):
    kv = make_kv(1)
    add(index, kv)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "apply_touches", full)
    for _ in range(3):
        index.touch(kv.key)
        index.flush_touches()
    assert [record.message.split(" in ")[0] for record in caplog.records] == ["the order of use is not up to date"]


def test_a_full_device_is_told_as_such(index, make_kv):
    index._writer.execute("PRAGMA max_page_count = 1")
    big = make_kv(1, tokens=20_000, dims=((1, 1),))
    with pytest.raises(OSError, match="no space for the index") as caught:
        add(index, big)
    assert caught.value.errno == 28
    index._writer.execute("PRAGMA max_page_count = 1000000")
    add(index, big)


def test_totals_are_carried_on_through_writes_of_this_process_and_others(index, tmp_path, make_kv):
    """In a transaction they are not counted anew, and equal what is counted all the same."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, kvs, there = random.Random(seed), [make_kv(number) for number in range(12)], {}
    other = Index(tmp_path / "index.sqlite")
    for _ in range(300):
        writer, kv, size = rng.choice([index, index, other]), rng.choice(kvs), rng.randrange(1000)
        before = dict(there)
        try:
            with writer.transaction():
                if rng.random() < 0.5:
                    assert writer.totals() == (len(there), sum(there.values()))
                if kv.key in there:
                    assert writer.delete(kv.key)
                    del there[kv.key]
                else:
                    assert not writer.delete(kv.key)
                    row = Row(kv.key, kv.fingerprint, kv.recipe, kv.token_ids, kv.nbytes, size, "p", 1.0, 2.0)
                    writer.insert(row)
                    there[kv.key] = size
                assert writer.totals() == (len(there), sum(there.values()))
                if rng.random() < 0.2:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            there = before
        assert index.totals() == other.totals() == (len(there), sum(there.values()))
    other.close()


def test_the_oldest_are_those_not_pinned_by_use(index, make_kv):
    kvs = [make_kv(number) for number in range(5)]
    for kv in kvs:
        add(index, kv)
    index.touch(kvs[0].key)
    with index.transaction():
        index.set_pinned([kvs[2].key], True)
        index.apply_touches()
        order = [kvs[number].key for number in (1, 3, 4, 0)]
        for nbytes, count in ((0, 0), (1, 1), (100, 1), (101, 2), (300, 3), (10_000, 4)):
            assert index.oldest(nbytes) == order[:count]


def test_keys_by_their_first_digits(index, make_kv):
    kvs = [make_kv(number) for number in range(40)]
    for kv in kvs:
        add(index, kv)
    assert index.keys() == {kv.key for kv in kvs}
    for digit in "0123456789abcdef":
        assert index.keys(digit) == {kv.key for kv in kvs if kv.key.startswith(digit)}
