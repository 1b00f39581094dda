"""The disk tier: limits, pins, full devices, rights, and files that vanish."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from dataclasses import replace

import pytest

from blendkv.errors import DamagedChunkError, StoreError, StoreFullError
from blendkv.market.classic import LruPolicy
from blendkv.store import POLICIES, KVStore
from blendkv.store.filereader import DiskReader
from blendkv.store.tensors import encode_chunk


@pytest.fixture
def store(tmp_path):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        yield store


def limited(tmp_path, kv, chunks):
    """A store by last use, with ``chunks`` chunks like ``kv`` on disk; the codec's JSON varies by a few bytes."""
    disk = chunks * len(encode_chunk(kv)) + 64
    return KVStore.open(tmp_path / "s", memory_bytes=0, disk_bytes=disk, policy="lru")


def files(root):
    return sorted(path.name for path in root.rglob("*") if path.is_file() and "index" not in path.name)


def present(store, kvs):
    return [store.contains(kv.key, kv.token_ids) for kv in kvs]


def test_the_least_recently_used_leaves_first(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(5)]
    with limited(tmp_path, kvs[0], 3) as store:
        for kv in kvs[:3]:
            store.put(kv)
        store.get(kvs[0].key, kvs[0].token_ids)
        store.put(kvs[3])
        assert present(store, kvs) == [True, False, True, True, False]
        store.put(kvs[2])  # known: nothing is written, but it is used
        store.put(kvs[4])
        assert present(store, kvs) == [False, False, True, True, True]
        stat = store.stat().tiers[1]
        assert stat.evictions == {"limit": 2}
        assert stat.bytes <= stat.limit
    assert len(files(tmp_path / "s")) == 3
    with limited(tmp_path, kvs[0], 3) as store:  # the order survives a restart
        store.put(kvs[0])
        assert present(store, kvs) == [True, False, True, False, True]


class Youngest(LruPolicy):
    """The most recently used leaves first."""

    def victims(self, nbytes, keep, now):
        return super().victims(1 << 60, keep, now)[-1:]


def test_another_policy_decides_what_leaves(tmp_path, make_kv, monkeypatch):
    monkeypatch.setitem(POLICIES._items, "youngest", Youngest)
    kvs = [make_kv(number) for number in range(5)]
    limit = 3 * len(encode_chunk(kvs[0])) + 64
    with KVStore.open(tmp_path / "s", memory_bytes=0, disk_bytes=limit, policy="youngest") as store:
        for kv in kvs[:3]:
            store.put(kv)
        store.pin([kvs[2].key])
        store.get(kvs[0].key, kvs[0].token_ids)
        store.put(kvs[3])
        assert present(store, kvs) == [False, True, True, True, False]
        store.put(kvs[4])
        assert present(store, kvs) == [False, True, True, False, True]


def test_pinned_chunks_stay_and_a_store_of_pins_is_full(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(4)]
    with limited(tmp_path, kvs[0], 2) as store:
        store.put(kvs[0])
        store.pin([kvs[0].key])
        store.put(kvs[1])
        store.put(kvs[2])
        assert present(store, kvs) == [True, False, True, False]
        store.pin([kvs[2].key])
        with pytest.raises(StoreFullError, match="pinned; raise the limit or unpin some"):
            store.put(kvs[3])
        assert present(store, kvs) == [True, False, True, False]
    with limited(tmp_path, kvs[0], 2) as store:  # pins survive a restart
        assert store.stat().pinned == 2
        with pytest.raises(StoreFullError):
            store.put(kvs[3])
        store.unpin([kvs[0].key])
        store.put(kvs[3])
        assert present(store, kvs) == [False, False, True, True]
    assert len(files(tmp_path / "s")) == 2


def test_gc_shrinks_to_a_lower_limit(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(4)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
        assert store.gc().evicted == 0
    with limited(tmp_path, kvs[0], 1) as store:
        report = store.gc()
        assert report.evicted == 3
        assert report.evicted_bytes > 3 * kvs[0].nbytes
        assert present(store, kvs) == [False, False, False, True]


def test_a_reader_outlives_the_eviction_of_its_chunk(store, make_kv, assert_same):
    kv = make_kv(1)
    store.put(kv)
    reader = store.get(kv.key, kv.token_ids)
    store.remove(kv.key)
    assert_same(reader, kv)


def test_readahead_and_cold_reads(store, make_kv, assert_same):
    kv = make_kv(1)
    store.put(kv)
    store.drop_page_cache()
    reader = store._disk.get(kv.key)
    for index in range(kv.layers):
        reader.readahead(index)
    assert_same(reader, kv)
    assert reader.bytes_read == kv.nbytes
    with pytest.raises(IndexError, match="layer 2 of a chunk KV with 2 layers"):
        reader.readahead(2)
    with pytest.raises(IndexError):
        reader.layer(-1)
    reader.close()
    reader.readahead(0)  # only a hint
    with pytest.raises(StoreError, match="is closed; ask the store for a new one"):
        reader.layer(0)
    with pytest.raises(StoreError, match="no chunk KV 000"):
        store._disk.drop_page_cache(["0" * 64])


def test_systems_without_fadvise(store, make_kv, assert_same, monkeypatch):
    kv = make_kv(1)
    store.put(kv)
    monkeypatch.delattr(os, "posix_fadvise")
    reader = store.get(kv.key, kv.token_ids)
    reader.readahead(0)
    assert_same(reader, kv)
    with pytest.raises(StoreError, match="measure cold reads on Linux"):
        store.drop_page_cache()


def test_no_descriptor_is_leaked(store, make_kv):
    kvs = [make_kv(number) for number in range(20)]
    before = len(os.listdir("/proc/self/fd"))
    for kv in kvs:
        store.put(kv)
        store.get(kv.key, kv.token_ids).layer(0)
    path = next(store._disk.root.glob("kv/*/*.safetensors"))
    path.write_bytes(b"")
    store.verify()
    assert len(os.listdir("/proc/self/fd")) == before


def failing(monkeypatch, name, code, times):
    """Make ``os.<name>`` fail ``times`` times with the errno ``code``."""
    real, left = getattr(os, name), [times]

    def call(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_device_costs_the_oldest_chunk(store, make_kv, monkeypatch, assert_holds, name, code):
    kvs = [make_kv(number) for number in range(4)]
    for kv in kvs[:3]:
        store.put(kv)
    with monkeypatch.context() as patch:
        failing(patch, name, code, 1)
        store.put(kvs[3])
    assert present(store, kvs) == [False, True, True, True]
    assert_holds(store, kvs[3])
    assert store.stat().tiers[1].evictions["full"] == 1
    assert len(files(store._disk.root)) == sum(present(store, kvs))


@pytest.mark.parametrize("name", ["write", "fsync", "replace"])
def test_a_device_that_stays_full_does_not_cost_the_whole_store(store, make_kv, monkeypatch, name):
    kvs = [make_kv(number) for number in range(12)]
    for kv in kvs[:11]:
        store.put(kv)
    with monkeypatch.context() as patch:
        failing(patch, name, errno.ENOSPC, 100)
        with pytest.raises(StoreFullError, match="no space on the device"):
            store.put(kvs[11])
    left = sum(present(store, kvs))
    assert left >= 5
    assert not store.contains(kvs[11].key, kvs[11].token_ids)
    assert len(files(store._disk.root)) == left
    assert store.verify().checked == left
    store.put(kvs[11])


def test_a_full_device_with_only_pins_is_full_at_once(store, make_kv, monkeypatch):
    kvs = [make_kv(number) for number in range(2)]
    store.put(kvs[0])
    store.pin([kvs[0].key])
    failing(monkeypatch, "write", errno.ENOSPC, 1)
    with pytest.raises(StoreFullError):
        store.put(kvs[1])
    assert present(store, kvs) == [True, False]


def test_a_full_device_while_the_row_is_written_leaves_no_file(store, make_kv, monkeypatch):
    kv = make_kv(1)

    def full(_):
        raise OSError(errno.ENOSPC, "no space for the index")

    with monkeypatch.context() as patch:
        patch.setattr(store._disk.index, "insert", full)
        with pytest.raises(StoreFullError):
            store.put(kv)
    assert files(store._disk.root) == []
    assert not store.contains(kv.key, kv.token_ids)


def test_a_chunk_that_another_process_stored_meanwhile_is_left_as_it_is(store, make_kv, monkeypatch, assert_holds):
    kv, write = make_kv(1), os.write
    with KVStore.open(store._disk.root, memory_bytes=0) as other:

        def write_after_the_other(fd, data):
            monkeypatch.setattr(os, "write", write)
            other.put(kv)
            other.pin([kv.key])
            return write(fd, data)

        monkeypatch.setattr(os, "write", write_after_the_other)
        store.put(kv)
        assert os.write is write
        assert len(files(store._disk.root)) == 1
        assert [info.pinned for info in store.ls()] == [True]  # its row was not made anew
        assert_holds(store, kv)
        assert_holds(other, kv)


def test_short_writes_are_continued(store, make_kv, monkeypatch, assert_holds):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:100]))
    store.put(make_kv(1))
    assert_holds(store, make_kv(1))


def test_other_errors_of_the_device_are_told(store, make_kv, monkeypatch):
    failing(monkeypatch, "fsync", errno.EIO, 1)
    with pytest.raises(StoreError, match=r"cannot write to the store at .*Input/output error"):
        store.put(make_kv(1))
    assert files(store._disk.root) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_really_full_device(tmp_path, make_kv, assert_holds):
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        kvs = [make_kv(number, tokens=1000, dims=((64, 64),)) for number in range(10)]  # 512 kB each
        with KVStore.open(mount / "s", memory_bytes=0) as store:
            for kv in kvs:
                store.put(kv)
                assert_holds(store, kv)
            assert 2 <= sum(present(store, kvs)) <= 6
            assert store.stat().tiers[1].evictions["full"] >= 4
            kept = [kv for kv in kvs if store.contains(kv.key, kv.token_ids)]
            store.pin([kv.key for kv in kept])
            with pytest.raises(StoreFullError):
                store.put(kvs[0])
            assert len(files(mount / "s")) == len(kept)
        with KVStore.open(mount / "s", memory_bytes=0) as store:
            assert not store.repair
            for kv in kept:
                assert_holds(store, kv)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_an_unreadable_file_is_damage(store, make_kv, monkeypatch, code):
    kv = make_kv(1)
    store.put(kv)
    row = store._disk.index.row(kv.key)
    failing(monkeypatch, "open", code, 1)
    with pytest.raises(DamagedChunkError, match="unreadable: " + os.strerror(code)):
        DiskReader(store._disk.root / row.path, row)


def test_a_missing_file_is_damage_unless_its_row_went_too(store, make_kv, monkeypatch):
    kv = make_kv(1)
    store.put(kv)
    disk = store._disk
    row = disk.index.row(kv.key)
    (disk.root / row.path).unlink()
    with pytest.raises(DamagedChunkError, match="missing: no such file"):
        disk.get(kv.key)
    answers = [row, None]  # as if another process evicted it between look-up and open
    monkeypatch.setattr(disk.index, "row", lambda _: answers.pop(0))
    assert disk.get(kv.key) is None
    assert answers == []


def test_a_chunk_that_was_evicted_and_stored_anew_between_look_up_and_open_is_read(
    store, make_kv, monkeypatch, assert_same
):
    kv = make_kv(1)
    store.put(kv)
    disk = store._disk
    row = disk.index.row(kv.key)
    answers = [replace(row, path="kv/gone"), row]
    monkeypatch.setattr(disk.index, "row", lambda _: answers.pop(0))
    assert_same(disk.get(kv.key), kv)
    assert answers == []


def test_verify_passes_over_what_goes_meanwhile(store, make_kv, monkeypatch):
    kvs = [make_kv(1), make_kv(2)]
    for kv in kvs:
        store.put(kv)
    rows = store._disk.index.rows()
    store.remove(kvs[0].key)
    monkeypatch.setattr(store._disk.index, "rows", lambda: rows)
    report = store.verify()
    assert (report.checked, report.damaged) == (1, ())


def test_a_row_without_a_file_is_written_again(store, make_kv, assert_holds):
    kv = make_kv(1)
    store.put(kv)
    next(store._disk.root.glob("kv/*/*.safetensors")).unlink()
    store.put(kv)
    assert_holds(store, kv)


def test_evictions_by_another_process_are_noticed(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(6)]
    with limited(tmp_path, kvs[0], 3) as one, limited(tmp_path, kvs[0], 3) as two:
        for kv in kvs[:3]:
            one.put(kv)
        two.put(kvs[3])  # evicts 0, which `one` put
        two.get(kvs[1].key, kvs[1].token_ids)
        two.flush()
        one.put(kvs[4])  # `two` used 1, so 2 goes
        assert present(one, kvs) == [False, True, False, True, True, False]
        two.remove(kvs[3].key)
        two.put(kvs[5])
        one.put(kvs[0])
        assert present(two, kvs) == [True, False, False, False, True, True]


def test_random_layouts_keep_the_limit(tmp_path, make_kv):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    with KVStore.open(tmp_path / "s", memory_bytes=0, disk_bytes=20_000) as store:
        for _ in range(60):
            store.put(make_kv(rng.randrange(40), tokens=rng.randint(1, 60)))
            assert store.stat().tiers[1].bytes <= 20_000
        on_disk = sum(path.stat().st_size for path in (tmp_path / "s" / "kv").rglob("*.safetensors"))
        assert on_disk == store.stat().tiers[1].bytes
