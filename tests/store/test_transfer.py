"""Archives of chunk files: whole there and back, and nothing wrong taken from one."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.store import KVStore
from blendkv.store.tensors import encode_chunk
from blendkv.store.transfer import export_chunks, import_chunks, opened


@pytest.fixture
def filled(tmp_path, make_kv):
    kvs = [make_kv(number, tokens=number + 1) for number in range(4)]
    with KVStore.open(tmp_path / "one", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
    return tmp_path / "one", kvs


def take(root, archive):
    with opened(root) as disk:
        return import_chunks(disk, archive)


def give(root, archive):
    with opened(root) as disk:
        return export_chunks(disk, archive)


def test_there_and_back(filled, tmp_path, assert_holds):
    root, kvs = filled
    archive = tmp_path / "chunks.tar"
    written = give(root, archive)
    assert (written.chunks, written.left_out) == (4, ())
    with KVStore.open(tmp_path / "two", memory_bytes=0) as store:
        store.put(kvs[0])
    read = take(tmp_path / "two", archive)
    assert (read.chunks, read.present, read.left_out) == (3, 1, ())
    with KVStore.open(tmp_path / "two", memory_bytes=0) as store:
        assert not store.repair
        for kv in kvs:
            assert_holds(store, kv)
    with pytest.raises(InputError, match="is there already"):
        give(root, archive)
    with tarfile.open(archive) as listed:
        assert sorted(listed.getnames()) == sorted(f"{kv.key}.safetensors" for kv in kvs)


def test_damage_in_the_store_is_left_out_and_named(filled, tmp_path):
    root, kvs = filled
    path = next((root / "kv").rglob(f"{kvs[2].key}*"))
    path.write_bytes(path.read_bytes()[:50])
    report = give(root, tmp_path / "chunks.tar")
    assert report.chunks == 3
    assert [key for key, _ in report.left_out] == [kvs[2].key]


def test_wrong_members_are_left_out(tmp_path, make_kv):
    kv, other, archive = make_kv(1), make_kv(2), tmp_path / "x.tar"
    good, altered = bytes(encode_chunk(kv)), bytearray(encode_chunk(other))
    altered[-1] ^= 1
    members = {
        f"{kv.key}.safetensors": good,
        f"{other.key}.safetensors": bytes(altered),
        f"{'0' * 64}.safetensors": good,
        "../../etc/passwd": b"root",
        f"{make_kv(3).key}.safetensors": b"",
    }
    with tarfile.open(archive, "w") as out:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo(f"{make_kv(4).key}.safetensors")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        out.addfile(link)
    report = take(tmp_path / "s", archive)
    assert report.chunks == 1
    assert {name: reason.split(":")[0] for name, reason in report.left_out} == {
        f"{other.key}.safetensors": "checksum",
        f"{'0' * 64}.safetensors": "mismatch",
        "../../etc/passwd": "it is no chunk file",
        f"{make_kv(3).key}.safetensors": "truncated",
        link.name: "it is no chunk file",
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 12_000), junk=st.binary(max_size=40), place=st.integers(0, 12_000))
def test_a_cut_or_altered_archive_gives_whole_chunks_or_none(filled, tmp_path_factory, assert_holds, cut, junk, place):
    root, kvs = filled
    folder = tmp_path_factory.mktemp("archive")
    give(root, folder / "chunks.tar")
    data = bytearray((folder / "chunks.tar").read_bytes())
    data[place : place + len(junk)] = junk
    (folder / "chunks.tar").write_bytes(data[: len(data) - cut])
    try:
        report = take(folder / "s", folder / "chunks.tar")
    except InputError:
        return
    with KVStore.open(folder / "s", memory_bytes=0) as store:
        assert len(store.ls()) == report.chunks
        known = {kv.key: kv for kv in kvs}
        for info in store.ls():
            assert_holds(store, known[info.key])


def test_what_is_no_archive(tmp_path):
    (tmp_path / "x").write_bytes(b"no archive")
    with pytest.raises(InputError, match="is no tar file of chunk KVs"):
        take(tmp_path / "s", tmp_path / "x")
    with pytest.raises(InputError, match="cannot read"):
        take(tmp_path / "s", tmp_path / "missing")
