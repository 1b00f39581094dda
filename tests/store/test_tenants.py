"""One store, several tenants: their chunks are apart, and a miss tells nothing of others."""

from __future__ import annotations

import re
import sqlite3

import pytest

from blendkv.errors import DamagedChunkError
from blendkv.store import KVStore
from blendkv.store.filereader import DiskReader
from blendkv.store.forms import PlainForm
from blendkv.store.index import Row
from blendkv.store.quotas import Quotas
from blendkv.store.repair import _read_row
from blendkv.store.reports import TenantUse
from blendkv.store.tensors import encode_chunk

A, B = "a" * 32, "b" * 32


def test_equal_tokens_of_two_tenants_are_two_chunks(tmp_path, make_kv, assert_holds):
    kvs = [make_kv(1, tenant=tag) for tag in ("", A, B)]
    assert len({kv.key for kv in kvs}) == 3
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        store.put(kvs[1])
        for kv in (kvs[0], kvs[2]):
            assert store.get(kv.key, kv.token_ids) is None
            assert not store.contains(kv.key, kv.token_ids)
        store.put(kvs[2])
        assert_holds(store, kvs[1])
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        assert_holds(store, kvs[1])
        assert_holds(store, kvs[2])
        assert store.get(kvs[0].key, kvs[0].token_ids) is None
        assert [(use.tag, use.chunks) for use in store.stat().tenants] == [(A, 1), (B, 1)]


def test_the_file_names_its_tenant_and_is_refused_as_anothers(tmp_path, make_kv):
    kv, other = make_kv(1, tenant=A), make_kv(1, tenant=B)
    path = tmp_path / "f"
    path.write_bytes(encode_chunk(kv))
    row = _read_row(path, kv.key, PlainForm())
    assert row.recipe == kv.recipe
    DiskReader(path, row).close()
    with pytest.raises(DamagedChunkError, match="mismatch"):
        DiskReader(path, Row(other.key, other.fingerprint, other.recipe, other.token_ids, 1, 1, "", 0.0, 0.0))
    with pytest.raises(DamagedChunkError, match="mismatch"):
        _read_row(path, other.key, PlainForm())


def test_a_lost_index_is_rebuilt_with_its_tenants(tmp_path, make_kv, assert_holds):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for number in range(3):
            store.put(make_kv(number, tenant=A))
        store.put(make_kv(0))
    for file in (tmp_path / "s").glob("index.sqlite*"):
        file.unlink()
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        assert store.repair.adopted == 4
        assert [(use.tag, use.chunks) for use in store.stat().tenants] == [("", 1), (A, 3)]
        assert_holds(store, make_kv(2, tenant=A))


@pytest.fixture
def statements(monkeypatch):
    """What any connection to SQLite is asked from now on, with keys and times left out."""
    seen: list[str] = []
    connect = sqlite3.connect

    def traced(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.set_trace_callback(lambda text: seen.append(re.sub(r"'[0-9a-f]{64}'|\d+\.\d+", "?", text)))
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    return seen


def asked(store, seen, kv):
    seen.clear()
    assert store.get(kv.key, kv.token_ids) is None
    assert not store.contains(kv.key, kv.token_ids)
    assert store.token_ids(kv.key) is None
    return list(seen)


def test_a_miss_for_what_another_tenant_has_asks_what_any_miss_asks(tmp_path, make_kv, statements):
    """Statement by statement, in the store that has the tokens and in one that has nothing."""
    empty = KVStore.open(tmp_path / "e", memory_bytes=0)
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store, empty:
        store.put(make_kv(1, tenant=A))
        probes = [make_kv(1, tenant=B), make_kv(1), make_kv(1, tenant="c" * 32), make_kv(2, tenant=A), make_kv(9)]
        runs = [asked(store, statements, kv) for kv in probes]
        assert len(runs[0]) >= 3
        assert all(run == runs[0] for run in runs)
        assert asked(empty, statements, probes[0]) == runs[0]
        memory, disk = store.stat().tiers
        assert (memory.misses, disk.misses) == (5, 5)
        assert store.stat().collision == 0


def test_stat_tells_what_each_has(tmp_path, make_kv):
    quotas = Quotas({A: 10_000, "c" * 32: 5}, 77_777, {A: "acme"})
    chunks = {"": (1,), A: (1, 2), B: (1,)}
    with KVStore.open(tmp_path / "k", memory_bytes=1 << 20, quotas=quotas) as store:
        for tag, numbers in chunks.items():
            for number in numbers:
                store.put(make_kv(number, tenant=tag))
        stat = store.stat()
    size = {tag: sum(len(encode_chunk(make_kv(n, tenant=tag))) for n in numbers) for tag, numbers in chunks.items()}
    nbytes = make_kv(1).nbytes
    assert stat.tenants == (
        TenantUse("", None, 1, nbytes, size[""], None),
        TenantUse(A, "acme", 2, 2 * nbytes, size[A], 10_000),
        TenantUse(B, None, 1, nbytes, size[B], 77_777),
        TenantUse("c" * 32, None, 0, 0, 0, 5),
    )
    assert [stat.quota(tag) for tag in ("", A, B, "d" * 32)] == [None, 10_000, 77_777, 77_777]
