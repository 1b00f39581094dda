"""KVStore: the tiers behind one door."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import pytest

from blendkv.errors import DamagedChunkError, InputError, StoreError, StoreFullError
from blendkv.store import KVStore, RepairReport, core
from blendkv.types import ChunkKV

BIG = 1 << 30


def open_store(tmp_path, memory_bytes=BIG, **options):
    return KVStore.open(tmp_path / "s", memory_bytes=memory_bytes, **options)


def chunk_file(store, kv):
    return store._disk.root / store._disk.index.row(kv.key).path


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)


def with_key(kv, key):
    """``kv`` under a key that is not its own: a digest collision."""
    kv.__dict__["key"] = key
    return kv


def test_what_was_put_comes_back_from_memory_and_from_disk(tmp_path, make_kv, assert_holds, disk_reads):
    kvs = [make_kv(number, tokens=number + 1) for number in range(4)]
    with open_store(tmp_path) as store:
        for kv in kvs:
            store.put(kv)
        for kv in kvs:
            assert_holds(store, kv)
        assert disk_reads == []
    with open_store(tmp_path) as store:
        for kv in kvs:
            assert_holds(store, kv)
    assert len(disk_reads) == sum(kv.layers for kv in kvs)


def test_an_unknown_key_is_a_miss(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        assert store.get(kv.key, kv.token_ids) is None
        assert not store.contains(kv.key, kv.token_ids)
        assert not store.remove(kv.key)
        memory, disk = store.stat().tiers
        assert (memory.misses, disk.misses, memory.hits, disk.hits) == (1, 1, 0, 0)


def test_a_second_pass_never_reads_the_disk_again(tmp_path, make_kv, assert_same, assert_holds, disk_reads):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
    with open_store(tmp_path) as store:
        reader = store.get(kv.key, kv.token_ids)
        reader.layer(1)
        assert not store._memory.contains(kv.key)
        assert reader.layer(1)[0] is reader.layer(1)[0]
        reader.readahead(1)
        reader.layer(0)
        assert store._memory.contains(kv.key)  # complete: promoted
        assert_same(reader, kv)
        assert reader.bytes_read == kv.nbytes
        assert isinstance(store.get(kv.key, kv.token_ids), ChunkKV)
        assert_holds(store, kv)
        stat = store.stat()
        assert stat.promoted == 1
        assert [(tier.hits, tier.misses) for tier in stat.tiers] == [(2, 1), (1, 0)]
    assert sorted(disk_reads) == [(kv.key, 0), (kv.key, 1)]


def test_a_chunk_too_large_for_memory_is_read_each_time(tmp_path, make_kv, assert_same):
    kv = make_kv(1)
    with open_store(tmp_path, memory_bytes=kv.nbytes - 1) as store:
        store.put(kv)
        reader = store.get(kv.key, kv.token_ids)
        for _ in range(2):
            assert_same(reader, kv)
        assert reader.bytes_read == 2 * kv.nbytes
        assert (store.stat().promoted, store.stat().not_in_memory) == (0, 1)


def test_a_promotion_that_no_longer_fits_is_counted(tmp_path, make_kv, assert_same):
    kv, other = make_kv(1), make_kv(2)
    with open_store(tmp_path, memory_bytes=kv.nbytes) as store:
        store.put(kv)
        store.put(other)
        reader = store.get(kv.key, kv.token_ids)
        store.pin([other.key])
        assert_same(reader, kv)
        assert (store.stat().promoted, store.stat().not_in_memory) == (0, 1)
        assert store._memory.contains(other.key)


@pytest.mark.parametrize("forget", ["remove", "close"])
def test_a_chunk_forgotten_while_it_is_read_is_not_promoted(tmp_path, make_kv, assert_same, forget):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
    with open_store(tmp_path) as store:
        reader = store.get(kv.key, kv.token_ids)
        if forget == "remove":
            store.remove(kv.key)
        else:
            store.close()
        assert_same(reader, kv)
        assert not store._memory.contains(kv.key)


def test_the_same_key_with_other_token_ids_is_a_collision(tmp_path, make_kv, assert_holds):
    kv, other = make_kv(1), make_kv(2)
    for memory_bytes in (BIG, 0):
        with open_store(tmp_path, memory_bytes) as store:
            store.put(kv)
            assert store.get(kv.key, other.token_ids) is None
            assert not store.contains(kv.key, other.token_ids)
            assert not store.contains(kv.key, kv.token_ids[:-1])
            with pytest.raises(StoreError, match="another chunk is stored under the key"):
                store.put(with_key(make_kv(2), kv.key))
            with pytest.raises(StoreError, match="another chunk is stored under the key"):
                store.put_async(with_key(make_kv(1, fingerprint="other model"), kv.key))
            assert store.stat().collision == 3
            assert sum(tier.hits for tier in store.stat().tiers) == 0
            assert_holds(store, kv)


def test_the_disk_itself_refuses_a_collision(tmp_path, make_kv, assert_holds):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
        with pytest.raises(StoreError, match="another chunk is stored"):
            store._disk.put(with_key(make_kv(2), kv.key))
        assert_holds(store, kv)


def test_putting_twice_writes_once(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
        before = chunk_file(store, kv).stat()
        store.put(kv)
        store.put_async(kv)
        store.flush()
        assert chunk_file(store, kv).stat().st_ino == before.st_ino


def test_token_ids_may_be_any_sequence(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
        assert store.contains(kv.key, list(kv.token_ids))
        assert store.get(kv.key, np.asarray(kv.token_ids, dtype=np.int64)) is not None


def test_damage_that_shows_at_once_is_a_counted_miss(tmp_path, make_kv, caplog):
    kvs = [make_kv(number) for number in range(3)]
    with open_store(tmp_path, memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
        chunk_file(store, kvs[0]).unlink()
        os.truncate(chunk_file(store, kvs[1]), 40)
        path = chunk_file(store, kvs[1])
        assert store.get(kvs[0].key, kvs[0].token_ids) is None
        assert store.get(kvs[1].key, kvs[1].token_ids) is None
        assert not path.exists()
        assert not store.contains(kvs[1].key, kvs[1].token_ids)
        stat = store.stat()
        assert stat.discarded == {"missing": 1, "truncated": 1}
        assert (stat.tiers[1].damaged, stat.tiers[1].misses, stat.tiers[1].chunks) == (2, 2, 1)
        store.put(kvs[1])
        assert store.get(kvs[1].key, kvs[1].token_ids) is not None
    assert "is damaged (missing: no such file); dropped" in caplog.text


def test_damage_that_shows_later_is_raised_and_the_chunk_dropped_once(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path, memory_bytes=0) as store:
        store.put(kv)
        flip_last_byte(chunk_file(store, kv))
        reader = store.get(kv.key, kv.token_ids)
        reader.layer(0)
        for _ in range(2):
            with pytest.raises(DamagedChunkError, match=r"checksum: v\.1 was altered") as caught:
                reader.layer(1)
        assert caught.value.key == kv.key
        assert not store.contains(kv.key, kv.token_ids)
        store.put(kv)
        with pytest.raises(DamagedChunkError):  # the old reader does not drop the new chunk
            reader.layer(0)
        assert store.contains(kv.key, kv.token_ids)
        assert store.stat().discarded == {"checksum": 1}
        store.discard("0" * 64, "not here: not counted")
        assert store.stat().discarded == {"checksum": 1}


def test_damage_found_after_closing_is_still_raised(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path, memory_bytes=0) as store:
        store.put(kv)
        flip_last_byte(chunk_file(store, kv))
        reader = store.get(kv.key, kv.token_ids)
    with pytest.raises(DamagedChunkError):
        reader.layer(1)


def test_damage_that_cannot_be_dropped_is_logged(tmp_path, make_kv, monkeypatch, caplog):
    kv = make_kv(1)
    with open_store(tmp_path, memory_bytes=0) as store:
        store.put(kv)
        os.truncate(chunk_file(store, kv), 3)

        def denied(*_, **__):
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.unlink", denied)
            assert store.get(kv.key, kv.token_ids) is None
            with pytest.raises(StoreError, match="Permission denied; check its rights"):
                store.remove(kv.key)
        assert store.stat().discarded == {}
        assert store.stat().tiers[1].damaged == 1
    assert "could not be dropped: cannot write to the store" in caplog.text


def test_discard_counts_by_reason_and_drops_everywhere(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
        store.discard(kv.key, "odd: values out of range")
        assert store.get(kv.key, kv.token_ids) is None
        assert store.ls() == []
        assert store.stat().discarded == {"odd": 1}


def test_verify_drops_and_lists_what_is_damaged(tmp_path, make_kv):
    kvs = [make_kv(number) for number in range(4)]
    with open_store(tmp_path) as store:
        for kv in kvs:
            store.put(kv)
        flip_last_byte(chunk_file(store, kvs[1]))
        chunk_file(store, kvs[2]).unlink()
        report = store.verify()
        assert (report.checked, report.bytes) == (2, 2 * kvs[0].nbytes)
        assert dict(report.damaged) == {
            kvs[1].key: "checksum: v.1 was altered",
            kvs[2].key: "missing: no such file",
        }
        assert {info.key for info in store.ls()} == {kvs[0].key, kvs[3].key}
        assert store.verify().damaged == ()


def test_the_memory_copy_stays_when_the_disk_is_full(tmp_path, make_kv, assert_holds):
    kv = make_kv(1)
    with open_store(tmp_path, disk_bytes=10) as store:
        with pytest.raises(StoreFullError, match="does not fit on disk: the limit is 10 bytes, 0 of them pinned"):
            store.put(kv)
        assert_holds(store, kv)
        assert [info.tiers for info in store.ls()] == [("memory",)]
        store.pin([kv.key])
        assert store.stat().pinned == 1


def test_a_pin_in_memory_follows_the_chunk_to_disk(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path, disk_bytes=10) as store:
        with pytest.raises(StoreFullError):
            store.put(kv)
        store.pin([kv.key])
        store._disk.limit = None
        store.put(kv)
    with open_store(tmp_path) as store:
        assert [info.pinned for info in store.ls()] == [True]


def test_memory_only(make_kv, assert_holds):
    a, b = make_kv(1), make_kv(2)
    with KVStore.open(None, memory_bytes=a.nbytes) as store:
        store.put(a)
        store.put_async(b)
        store.flush()
        assert store.get(a.key, a.token_ids) is None
        assert_holds(store, b)
        assert [info.key for info in store.ls()] == [b.key]
        store.pin([b.key])
        with pytest.raises(StoreFullError, match="does not fit in memory"):
            store.put(a)
        stat = store.stat()
        assert [tier.name for tier in stat.tiers] == ["memory"]
        assert (stat.pinned, stat.not_in_memory, stat.tiers[0].evictions) == (1, 1, {"limit": 1})
        assert store.verify().checked == 0
        assert store.gc().repair == RepairReport()
        store.drop_page_cache()
        assert store.remove(b.key)
        assert store.ls() == []


def test_ls_tells_where_and_when(tmp_path, make_kv):
    kvs = [make_kv(number, tokens=number + 2) for number in range(3)]
    with open_store(tmp_path, memory_bytes=kvs[2].nbytes, policy="lru") as store:
        for kv in kvs:
            store.put(kv)
        store.get(kvs[0].key, kvs[0].token_ids)
        store.pin([kvs[1].key])
        infos = store.ls()
        assert [info.key for info in infos] == [kvs[1].key, kvs[2].key, kvs[0].key]
        assert [info.tokens for info in infos] == [3, 4, 2]
        assert [info.pinned for info in infos] == [True, False, False]
        assert [info.tiers for info in infos] == [("disk",), ("memory", "disk"), ("disk",)]
        last = infos[-1]
        assert (last.fingerprint, last.recipe, last.nbytes) == ("model", kvs[0].recipe, kvs[0].nbytes)
        assert last.file_bytes > last.nbytes
        assert last.last_used >= last.created > 1.7e9


def test_pins_need_a_known_key(tmp_path, make_kv):
    kv = make_kv(1)
    with open_store(tmp_path) as store:
        store.put(kv)
        with pytest.raises(InputError, match="no chunk KV 000000000000 in the store; list the store"):
            store.pin([kv.key, "0" * 64])
        assert store.stat().pinned == 0
        store.pin([kv.key])
        with pytest.raises(InputError):
            store.unpin(["0" * 64])
        store.remove(kv.key)
        assert store.stat().pinned == 0


def test_memory_pins_are_known_after_a_restart(tmp_path, make_kv):
    a, b = make_kv(1), make_kv(2)
    with open_store(tmp_path) as store:
        store.put(a)
        store.pin([a.key])
    with open_store(tmp_path, memory_bytes=a.nbytes, policy="lru") as store:
        store.put(a)
        store.put(b)
        assert store._memory.contains(a.key)
        store.unpin([a.key])
        store.put(b)
        assert store._memory.contains(b.key)


def test_a_closed_store_says_so(tmp_path, make_kv):
    kv = make_kv(1)
    store = open_store(tmp_path)
    store.close()
    store.close()
    for call in (
        lambda: store.get(kv.key, kv.token_ids),
        lambda: store.contains(kv.key, kv.token_ids),
        lambda: store.put(kv),
        lambda: store.put_async(kv),
        store.flush,
        store.ls,
        store.stat,
        store.verify,
        store.gc,
        store.drop_page_cache,
        lambda: store.pin([]),
        lambda: store.remove(kv.key),
        lambda: store.discard(kv.key, "x"),
    ):
        with pytest.raises(StoreError, match="the store is closed; open it again"):
            call()


class Gate:
    """Holds every write to disk until it is opened."""

    def __init__(self, store, monkeypatch):
        self.entered, self.open = threading.Event(), threading.Event()
        put = store._disk.put

        def wait(kv):
            self.entered.set()
            assert self.open.wait(30)
            put(kv)

        monkeypatch.setattr(store._disk, "put", wait)


def test_async_puts_are_there_at_once_and_on_disk_after_flush(tmp_path, make_kv, assert_holds, monkeypatch):
    kvs = [make_kv(number) for number in range(5)]
    with open_store(tmp_path, memory_bytes=0) as store:
        gate = Gate(store, monkeypatch)
        for kv in kvs:
            store.put_async(kv)
            store.put_async(kv)
        assert gate.entered.wait(30)
        for kv in kvs:
            assert_holds(store, kv)
        assert not store.contains(kvs[0].key, kvs[1].token_ids)
        assert store.ls() == []
        assert store.stat().pending_bytes >= 5 * kvs[0].nbytes
        gate.open.set()
        store.flush()
        assert store.stat().pending_bytes == 0
        assert {info.key for info in store.ls()} == {kv.key for kv in kvs}
    with open_store(tmp_path, memory_bytes=0) as store:
        for kv in kvs:
            assert_holds(store, kv)


def test_close_writes_what_waits(tmp_path, make_kv, assert_holds):
    kvs = [make_kv(number) for number in range(5)]
    with open_store(tmp_path) as store:
        for kv in kvs:
            store.put_async(kv)
    with open_store(tmp_path) as store:
        for kv in kvs:
            assert_holds(store, kv)


def test_a_full_queue_holds_the_caller_back(tmp_path, make_kv, monkeypatch):
    kvs = [make_kv(number) for number in range(3)]
    monkeypatch.setattr(core, "QUEUE_BYTES", 2 * kvs[0].nbytes)
    with open_store(tmp_path) as store:
        gate = Gate(store, monkeypatch)
        store.put_async(kvs[0])
        store.put_async(kvs[1])
        third = threading.Thread(target=store.put_async, args=(kvs[2],))
        third.start()
        assert gate.entered.wait(30)
        third.join(0.05)
        assert third.is_alive()
        assert store.stat().pending_bytes == 2 * kvs[0].nbytes
        gate.open.set()
        third.join(30)
        assert not third.is_alive()
        store.flush()
        assert len(store.ls()) == 3


def test_a_chunk_larger_than_the_queue_passes_alone(tmp_path, make_kv, monkeypatch):
    monkeypatch.setattr(core, "QUEUE_BYTES", 1)
    with open_store(tmp_path) as store:
        store.put_async(make_kv(1))
        store.put_async(make_kv(2))
        store.flush()
        assert len(store.ls()) == 2


def test_removing_what_waits_or_is_being_written(tmp_path, make_kv, monkeypatch):
    kvs = [make_kv(number) for number in range(2)]
    with open_store(tmp_path) as store:
        gate = Gate(store, monkeypatch)
        store.put_async(kvs[0])
        assert gate.entered.wait(30)
        store.put_async(kvs[1])
        assert store.remove(kvs[1].key)
        remover = threading.Thread(target=store.remove, args=(kvs[0].key,))
        remover.start()
        gate.open.set()
        remover.join(30)
        store.flush()
        assert store.ls() == []


def test_pinning_waits_for_the_row(tmp_path, make_kv, monkeypatch):
    kv = make_kv(1)
    with open_store(tmp_path, memory_bytes=0) as store:
        gate = Gate(store, monkeypatch)
        store.put_async(kv)
        pinner = threading.Thread(target=store.pin, args=([kv.key],))
        pinner.start()
        pinner.join(0.05)
        assert pinner.is_alive()
        gate.open.set()
        pinner.join(30)
        assert [info.pinned for info in store.ls()] == [True]


def test_background_errors_are_counted_logged_once_and_raised_by_flush(tmp_path, make_kv, caplog):
    with open_store(tmp_path, disk_bytes=10) as store:
        for number in range(3):
            store.put_async(make_kv(number))
        with pytest.raises(
            StoreFullError, match="3 chunk KVs could not be stored in the background; the first: a chunk"
        ):
            store.flush()
        assert store.stat().background_errors == 3
        store.flush()  # told once
    assert len([record for record in caplog.records if "in the background" in record.message]) == 1


def test_unexpected_background_errors_do_not_end_the_thread(tmp_path, make_kv, monkeypatch, assert_holds):
    with open_store(tmp_path, memory_bytes=0) as store:
        put, answers = store._disk.put, [ValueError("odd"), None]

        def once(kv):
            if (answer := answers.pop(0)) is not None:
                raise answer
            put(kv)

        monkeypatch.setattr(store._disk, "put", once)
        store.put_async(make_kv(1))
        store.put_async(make_kv(2))
        with pytest.raises(StoreError, match=r"could not be stored \(ValueError: odd\)") as caught:
            store.flush()
        assert not isinstance(caught.value, StoreFullError)
        assert_holds(store, make_kv(2))


def test_close_logs_errors_that_nobody_flushed(tmp_path, make_kv, caplog):
    with open_store(tmp_path, disk_bytes=10) as store:
        store.put_async(make_kv(1))
    assert next(record.message for record in caplog.records if record.levelno == logging.ERROR).startswith(
        "1 chunk KVs could not be stored in the background: a chunk KV of"
    )


def test_a_closed_writer_takes_nothing(tmp_path, make_kv):
    with open_store(tmp_path) as store:
        pass
    with pytest.raises(StoreError, match="closed"):
        store._writer.submit(make_kv(1))
