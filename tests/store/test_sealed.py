"""Encrypted stores: nothing lies in the clear, what was altered or moved is damaged, the key is asked for."""

from __future__ import annotations

import base64
import random
import shutil
import sqlite3
import tarfile

import numpy as np
import pytest
import torch

from blendkv.errors import DamagedChunkError, InputError
from blendkv.store import KVStore
from blendkv.store.filereader import SealedReader
from blendkv.store.quotas import Quotas
from blendkv.store.seal import KEY_VARIABLE
from blendkv.store.segments import Table
from blendkv.store.tensors import encode_chunk
from blendkv.store.transfer import export_chunks, import_chunks, opened


def key_of(number):
    return base64.b64encode(random.Random(number).randbytes(32)).decode()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, key_of(1))


def encrypted(path, **options):
    return KVStore.open(path, **{"memory_bytes": 0, "encrypt": True, **options})


def file_of(path, kv):
    return path / "kv" / kv.key[:2] / f"{kv.key}.sealed"


@pytest.fixture
def kvs(make_kv):
    """Long enough that no run of bytes is there by chance."""
    return [make_kv(number, tokens=64, dims=((16, 16), (8, 24))) for number in range(4)]


def test_chunks_come_back_exactly_and_layer_by_layer(tmp_path, kvs, assert_holds, assert_same):
    with encrypted(tmp_path / "s") as store:
        for kv in kvs:
            store.put(kv)
            assert_holds(store, kv)
        reader = store.get(kvs[0].key, kvs[0].token_ids)
        reader.layer(1)
        table = Table.parse(file_of(tmp_path / "s", kvs[0]).read_bytes(), kvs[0].key)
        assert reader.bytes_read == table.segments[0].stored + table.segments[2].stored  # not the other layer
        assert_same(reader, kvs[0])
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:  # it knows that it is encrypted
        assert not store.repair
        assert not store.verify().damaged
        for kv in kvs:
            assert_holds(store, kv)
            assert_holds(store, kv)  # from memory


def test_neither_tokens_nor_kv_lie_in_the_clear(tmp_path, kvs):
    with encrypted(tmp_path / "s") as store:
        for kv in kvs:
            store.put(kv)
    written = b"".join(file.read_bytes() for file in (tmp_path / "s").rglob("*") if file.is_file())
    assert len(written) > sum(kv.nbytes for kv in kvs)
    for kv in kvs:
        ids = kv.token_ids.astype("<i4").tobytes()
        for data in (ids, *(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in kv.k)):
            assert data[:16] not in written
    assert b'"prefix"' not in written
    assert b"token_ids_digest" not in written


def test_a_plain_store_would_fail_that_test(tmp_path, kvs):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kvs[0])
    written = b"".join(file.read_bytes() for file in (tmp_path / "s").rglob("*") if file.is_file())
    assert written.count(kvs[0].token_ids.astype("<i4").tobytes()[:16]) == 2  # the file, and the index
    assert b'"prefix"' in written


def test_the_key_is_asked_for(tmp_path, kvs, monkeypatch):
    with encrypted(tmp_path / "s") as store:
        store.put(kvs[0])
    before = file_of(tmp_path / "s", kvs[0]).read_bytes()
    for value, message in (
        (None, "BLENDKV_ENCRYPTION_KEY is not set"),
        (key_of(2), r"encrypted with key [0-9a-f]{16}"),
    ):
        monkeypatch.delenv(KEY_VARIABLE) if value is None else monkeypatch.setenv(KEY_VARIABLE, value)
        for encrypt in (True, None):
            with pytest.raises(InputError, match=message) as caught:
                encrypted(tmp_path / "s", encrypt=encrypt)
            assert "\n" not in str(caught.value)
            assert value is None or value not in str(caught.value)
    with pytest.raises(InputError, match="is encrypted from its beginning"):
        encrypted(tmp_path / "s", encrypt=False)
    assert file_of(tmp_path / "s", kvs[0]).read_bytes() == before


def test_what_cannot_be_encrypted_says_so(tmp_path, kvs, monkeypatch):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kvs[0])
    with pytest.raises(InputError, match="is not encrypted from its beginning"):
        encrypted(tmp_path / "s")
    with pytest.raises(InputError, match="in memory only"):
        encrypted(None)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(InputError, match="is encrypted and BLENDKV_ENCRYPTION_KEY is not set"):
        encrypted(tmp_path / "new")
    KVStore.open(tmp_path / "new", memory_bytes=0).close()  # nothing was decided then


def read_all(reader):
    for index in range(reader.layers):
        reader.layer(index)


def damaged(store, kv):
    """Whether the chunk is known to be damaged; never another's tensors."""
    discarded = sum(store.stat().discarded.values())
    reader = store.get(kv.key, kv.token_ids)
    if reader is not None:
        with pytest.raises(DamagedChunkError):
            read_all(reader)
    return sum(store.stat().discarded.values()) == discarded + 1 and not store.contains(kv.key, kv.token_ids)


def test_any_flipped_bit_is_damage(tmp_path, make_kv, assert_same):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, kv = random.Random(seed), make_kv(1)
    with encrypted(tmp_path / "s") as store:
        store.put(kv)
        path = file_of(tmp_path / "s", kv)
        data = path.read_bytes()
        places = [*range(40), *rng.sample(range(len(data)), 200)]
        for place in places:
            store.put(kv)
            broken = bytearray(path.read_bytes())
            broken[place] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            assert damaged(store, kv), place
        for cut in rng.sample(range(len(data)), 40):
            store.put(kv)
            path.write_bytes(path.read_bytes()[:cut])
            assert damaged(store, kv), cut
        store.put(kv)
        assert_same(store.get(kv.key, kv.token_ids), kv)


def test_swapped_files_and_layers_are_damage(tmp_path, make_kv):
    """With every checksum right: only the seal knows that a segment stands in another's place."""
    one, other = (make_kv(number, dims=((4, 4), (4, 4))) for number in (1, 2))
    with encrypted(tmp_path / "s") as store:
        store.put(one)
        store.put(other)
        shutil.copy(file_of(tmp_path / "s", other), file_of(tmp_path / "s", one))
        assert damaged(store, one)
        store.put(one)
        path = file_of(tmp_path / "s", one)
        data = path.read_bytes()
        table = Table.parse(data, one.key)
        head, first, second = table.segments
        assert first.stored == second.stored
        start = first.start
        layers = data[start : start + first.stored], data[start + first.stored :]
        swapped = (
            head,
            *(
                type(first)(start + n * first.stored, first.stored, first.raw, segment.checksum, False)
                for n, segment in enumerate((second, first))
            ),
        )
        path.write_bytes(
            Table(table.writing, True, swapped).encode() + data[head.start : start] + layers[1] + layers[0]
        )
        assert damaged(store, one)
        # A layer of another chunk of the same form.
        store.put(one)
        data, theirs = path.read_bytes(), file_of(tmp_path / "s", other).read_bytes()
        mine, other_table = Table.parse(data, one.key), Table.parse(theirs, other.key)
        segments = (*mine.segments[:2], other_table.segments[2])
        start = mine.segments[2].start
        path.write_bytes(Table(mine.writing, True, segments).encode() + data[head.start : start] + theirs[start:])
        assert damaged(store, one)


def test_a_plain_file_in_its_place_is_damage(tmp_path, kvs):
    with encrypted(tmp_path / "s") as store:
        store.put(kvs[0])
        file_of(tmp_path / "s", kvs[0]).write_bytes(encode_chunk(kvs[0]))
        assert damaged(store, kvs[0])


def test_an_altered_row_of_the_index_drops_its_chunk_and_no_other(tmp_path, kvs, assert_holds, caplog):
    with encrypted(tmp_path / "s") as store:
        for kv in kvs:
            store.put(kv)
    connection = sqlite3.connect(tmp_path / "s" / "index.sqlite")
    for kv, column in ((kvs[0], "token_ids"), (kvs[1], "recipe")):
        other = connection.execute(f"SELECT {column} FROM chunks WHERE key = ?", (kvs[2].key,)).fetchone()[0]
        changed = other if column == "token_ids" else other[:40] + ("A" if other[40] != "A" else "B") + other[41:]
        connection.execute(f"UPDATE chunks SET {column} = ? WHERE key = ?", (changed, kv.key))
    connection.commit()
    connection.close()
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        assert {key for key, _ in store.verify().damaged} == {kvs[0].key, kvs[1].key}
        assert not store.contains(kvs[0].key, kvs[0].token_ids)
        store.put(kvs[0])
        for kv in (kvs[0], kvs[2], kvs[3]):
            assert_holds(store, kv)
    assert sum("rows that do not open" in record.message for record in caplog.records) == 1


def test_a_lost_index_is_rebuilt_only_with_the_key(tmp_path, kvs, assert_holds):
    with encrypted(tmp_path / "s") as store:
        for kv in kvs:
            store.put(kv)

    def lose():
        for file in (tmp_path / "s").glob("index.sqlite*"):
            file.unlink()

    lose()
    with pytest.raises(InputError, match=r"index of .* is gone, and its files are \*.sealed; give --encrypt"):
        KVStore.open(tmp_path / "s", memory_bytes=0)
    broken = file_of(tmp_path / "s", kvs[3])
    broken.write_bytes(broken.read_bytes()[:-1])
    with encrypted(tmp_path / "s") as store:
        assert (store.repair.adopted, store.repair.deleted_files) == (3, 1)
        for kv in kvs[:3]:
            assert_holds(store, kv)


def test_a_plain_store_with_a_lost_index_is_not_taken_for_an_encrypted_one(tmp_path, kvs):
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kvs[0])
    for file in (tmp_path / "s").glob("index.sqlite*"):
        file.unlink()
    with pytest.raises(InputError, match="leave --encrypt out"):
        encrypted(tmp_path / "s")
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        assert store.repair.adopted == 1


def test_limits_and_quotas_count_what_lies_on_the_disk(tmp_path, make_kv):
    tag = "a" * 32
    with encrypted(tmp_path / "a") as store:
        store.put(make_kv(0, tenant=tag))
    (size,) = (file.stat().st_size for file in (tmp_path / "a").rglob("*.sealed"))
    with encrypted(tmp_path / "s", quotas=Quotas({tag: 2 * size})) as store:
        for number in range(5):
            store.put(make_kv(number, tenant=tag))
        assert store.stat().tenants[0].disk_bytes == 2 * size
        assert sum(file.stat().st_size for file in (tmp_path / "s").rglob("*.sealed")) == 2 * size


def test_moving_chunks_out_takes_a_word_and_in_takes_none(tmp_path, kvs, assert_holds):
    with encrypted(tmp_path / "s") as store:
        for kv in kvs:
            store.put(kv)
    with opened(tmp_path / "s") as disk:
        with pytest.raises(InputError, match="is encrypted and an archive is not; give --plain"):
            export_chunks(disk, tmp_path / "a.tar")
        assert not (tmp_path / "a.tar").exists()
        report = export_chunks(disk, tmp_path / "a.tar", plain=True)
    assert (report.chunks, report.left_out) == (4, ())
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert {member.name for member in archive} == {f"{kv.key}.safetensors" for kv in kvs}
    with opened(tmp_path / "plain") as disk:
        assert import_chunks(disk, tmp_path / "a.tar").chunks == 4
    with opened(tmp_path / "other", encrypt=True) as disk:
        assert import_chunks(disk, tmp_path / "a.tar").chunks == 4
    for name in ("plain", "other"):
        with KVStore.open(tmp_path / name, memory_bytes=0) as store:
            for kv in kvs:
                assert_holds(store, kv)
    assert not list((tmp_path / "other").rglob("*.safetensors"))


def test_a_segment_is_read_alone(tmp_path, kvs, monkeypatch):
    """One layer is unsealed when one layer is asked for."""
    numbers = []
    segment = SealedReader._segment
    monkeypatch.setattr(SealedReader, "_segment", lambda self, n: numbers.append(n) or segment(self, n))
    with encrypted(tmp_path / "s") as store:
        store.put(kvs[0])
        store.get(kvs[0].key, kvs[0].token_ids).layer(1)
    assert numbers == [0, 2]


def test_the_index_reads_sealed_token_ids_as_they_were(tmp_path, kvs):
    with encrypted(tmp_path / "s") as store:
        for kv in kvs:
            store.put(kv)
        found = {entry.key: entry for entry in store.index.entries([kv.key for kv in kvs])}
        assert all(np.array_equal(found[kv.key].token_ids, kv.token_ids) for kv in kvs)
        assert all(found[kv.key].recipe == kv.recipe for kv in kvs)
        assert store.index.usage.read()["raw"].chunks == 4
