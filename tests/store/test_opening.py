"""Opening: what is refused, what is repaired."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from blendkv.errors import InputError, StoreError, StoreMismatchError
from blendkv.store import KVStore, RepairReport, chunkfile
from blendkv.store.files import delete_leftover, temporary_file


def filled(path, kvs):
    with KVStore.open(path, memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)


def chunk_file(path, kv):
    return path / "kv" / kv.key[:2] / f"{kv.key}.safetensors"


def opened(path):
    with KVStore.open(path, memory_bytes=0) as store:
        return store.repair, {info.key for info in store.ls()}


def test_a_fresh_and_a_clean_store_need_no_repair(tmp_path, make_kv):
    path = tmp_path / "deep" / "store"
    filled(path, [make_kv(1)])
    assert opened(str(path)) == (RepairReport(), {make_kv(1).key})
    assert not RepairReport()


def test_a_home_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    KVStore.open("~/store", memory_bytes=0).close()
    assert (tmp_path / "store" / "index.sqlite").exists()


def test_a_directory_of_something_else_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not a store and holds other files \(thesis.txt, ...\)"):
        KVStore.open(tmp_path, memory_bytes=0)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(InputError, match="is a file; a store needs a directory of its own"):
        KVStore.open(tmp_path / "f", memory_bytes=0)


def test_a_directory_without_rights_is_told(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    with pytest.raises(StoreError, match=r"cannot open the store at .*Permission denied; check the directory's rights"):
        KVStore.open(tmp_path / "s", memory_bytes=0)


def test_an_index_that_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "s" / "index.sqlite").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be used"):
        KVStore.open(tmp_path / "s", memory_bytes=0)


def test_a_kill_while_the_index_was_made_is_no_obstacle(tmp_path, make_kv):
    (tmp_path / "s" / "kv").mkdir(parents=True)
    (tmp_path / "s" / "index.sqlite").touch()
    filled(tmp_path / "s", [make_kv(1)])
    assert opened(tmp_path / "s") == (RepairReport(), {make_kv(1).key})


def test_crash_leftovers_are_put_right_and_logged_in_one_line(tmp_path, make_kv, caplog, assert_holds):
    path = tmp_path / "s"
    kvs = [make_kv(number) for number in range(5)]
    filled(path, kvs)
    with KVStore.open(path, memory_bytes=0) as store:
        with store._disk.index.transaction():
            for kv in kvs[:3]:  # files without a row: 0 whole, 1 damaged, 2 truncated
                store._disk.index.delete(kv.key)
        data = bytearray(chunk_file(path, kvs[1]).read_bytes())
        data[-1] ^= 1
        chunk_file(path, kvs[1]).write_bytes(data)
        os.truncate(chunk_file(path, kvs[2]), 100)
        chunk_file(path, kvs[3]).unlink()  # a row without a file
        (path / "kv" / "ab").mkdir(exist_ok=True)
        (path / "kv" / "ab" / ".left.1.2.tmp").write_text("half")
        (path / "kv" / "ab" / "README").write_text("not ours")
        (path / "kv" / "note").write_text("not ours")
    with KVStore.open(path, memory_bytes=0) as store:
        assert store.repair == RepairReport(adopted=1, deleted_files=2, dropped_rows=1, temporary=1)
        assert [kv.key in {info.key for info in store.ls()} for kv in kvs] == [True, False, False, False, True]
        assert_holds(store, kvs[0])
    assert len([record for record in caplog.records if "repaired" in record.message]) == 1
    assert "1 files adopted, 2 unusable files deleted" in caplog.text
    assert (path / "kv" / "ab" / "README").exists()
    assert not (path / "kv" / "ab" / ".left.1.2.tmp").exists()
    assert opened(path)[0] == RepairReport()


def test_an_unreadable_orphan_is_deleted(tmp_path, make_kv):
    path, kv = tmp_path / "s", make_kv(1)
    filled(path, [])
    chunk_file(path, kv).parent.mkdir()
    chunk_file(path, kv).symlink_to(tmp_path / "nowhere")
    with KVStore.open(path, memory_bytes=0) as store:
        assert store.repair.deleted_files == 1
    assert not chunk_file(path, kv).is_symlink()


def test_files_of_a_newer_version_are_not_deleted(tmp_path, make_kv, monkeypatch):
    path = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr(chunkfile, "FORMAT", 2)
        filled(path, [make_kv(1)])
    for name in os.listdir(path):
        if "index" in name:
            (path / name).unlink()
    with pytest.raises(StoreMismatchError, match="has format 2"):
        KVStore.open(path, memory_bytes=0)
    assert chunk_file(path, make_kv(1)).exists()


def test_gc_sweeps_while_the_store_is_open(tmp_path, make_kv):
    path = tmp_path / "s"
    filled(path, [make_kv(1)])
    with KVStore.open(path, memory_bytes=0) as store:
        chunk_file(path, make_kv(1)).unlink()
        assert store.gc().repair == RepairReport(dropped_rows=1)


def test_an_orphan_that_got_its_row_meanwhile_is_left_alone(tmp_path, make_kv, monkeypatch):
    path, kv = tmp_path / "s", make_kv(1)
    filled(path, [kv])
    with KVStore.open(path, memory_bytes=0) as store:
        monkeypatch.setattr(store._disk.index, "keys", set)  # as before the writer's commit
        store.gc()
        assert chunk_file(path, kv).exists()
        assert store.verify().checked == 1


def test_processes_open_in_turn(tmp_path):
    stores = []
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    opener = threading.Thread(target=lambda: stores.append(KVStore.open(tmp_path, memory_bytes=0)))
    opener.start()
    opener.join(0.1)
    assert opener.is_alive()
    assert os.listdir(tmp_path) == []
    os.close(fd)
    opener.join(30)
    stores[0].close()


def test_temporary_files_of_living_writers_are_left_alone(tmp_path):
    with temporary_file(tmp_path / "x") as (_, path):
        assert not delete_leftover(path)
        assert path.exists()
    assert not path.exists()
    path.touch()
    assert delete_leftover(path)
    assert not path.exists()
    assert not delete_leftover(path)


def test_a_file_that_was_finished_while_the_sweep_looked_at_it_is_not_counted(tmp_path, monkeypatch):
    path, flock = tmp_path / "x", fcntl.flock
    path.touch()

    def finish_first(fd, flags):
        path.rename(tmp_path / "done")
        flock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    assert not delete_leftover(path)
    assert (tmp_path / "done").exists()


def test_a_writer_whose_new_file_was_swept_begins_again(tmp_path, monkeypatch):
    flock, swept = fcntl.flock, []

    def sweep_first(fd, flags):
        if not swept:  # the sweep comes between creation and lock
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        flock(fd, flags)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with temporary_file(tmp_path / "x") as (fd, path):
        os.write(fd, b"data")
        assert path.read_bytes() == b"data"
        assert path != swept[0]
