"""The file format: exact round trips, and no damage that goes unnoticed."""

from __future__ import annotations

import json
import os
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from blendkv.errors import DamagedChunkError, InputError, StoreMismatchError
from blendkv.store import chunkfile
from blendkv.store.filereader import DiskReader
from blendkv.store.forms import PlainForm
from blendkv.store.index import Row
from blendkv.store.repair import _read_row
from blendkv.store.tensors import encode_chunk

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


def row_of(kv, size=0):
    return Row(kv.key, kv.fingerprint, kv.recipe, kv.token_ids, kv.nbytes, size, "", 0.0, 0.0)


def outcome(path, kv, assert_same):
    """Read everything: the data if it is exact, or the reason it is refused. Wrong data fails."""
    try:
        reader = DiskReader(path, row_of(kv))
        assert_same(reader, kv)
        reader.verify()
    except DamagedChunkError as error:
        return error.reason
    return "exact"


@given(
    number=st.integers(0, 1000),
    tokens=st.integers(1, 17),
    heads=st.integers(1, 3),
    dims=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(make_kv, assert_same, tmp_path_factory, number, tokens, heads, dims, dtype):
    kv = make_kv(number, tokens=tokens, heads=heads, dims=tuple(dims), dtype=dtype)
    path = tmp_path_factory.mktemp("file") / "x"
    path.write_bytes(encode_chunk(kv))
    assert outcome(path, kv, assert_same) == "exact"
    row = _read_row(path, kv.key, PlainForm())
    assert (row.key, row.recipe, row.nbytes, row.file_bytes) == (kv.key, kv.recipe, kv.nbytes, path.stat().st_size)


def test_special_values_survive(make_kv, assert_same, tmp_path):
    kv = make_kv(1, dtype=torch.float32)
    kv.k[0].view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    path = tmp_path / "x"
    path.write_bytes(encode_chunk(kv))
    assert outcome(path, kv, assert_same) == "exact"


def test_any_safetensors_reader_can_read_it(make_kv, tmp_path):
    kv = make_kv(1)
    path = tmp_path / "x"
    path.write_bytes(encode_chunk(kv))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"token_ids", "k.0", "v.0", "k.1", "v.1"}
        assert torch.equal(file.get_tensor("k.1"), kv.k[1])
        assert file.get_tensor("token_ids").tolist() == kv.token_ids.tolist()
        metadata = file.metadata()
    assert metadata["format"] == "1"
    assert metadata["fingerprint"] == "model"
    assert json.loads(metadata["recipe"])["prefix"] == [1, 7]


def test_every_single_bit_flip_is_noticed_or_harmless(make_kv, assert_same, tmp_path):
    kv = make_kv(1, tokens=1, dims=((1, 2),), heads=1)
    data = bytes(encode_chunk(kv))
    path = tmp_path / "x"
    path.write_bytes(data)
    outcomes = set()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(data)):
            offset, mask = bit // 8, 1 << bit % 8
            os.pwrite(file.fileno(), bytes([data[offset] ^ mask]), offset)
            outcomes.add(outcome(path, kv, assert_same).split(":")[0])
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    assert outcome(path, kv, assert_same) == "exact"
    assert {"header", "checksum", "truncated"} <= outcomes <= {"header", "checksum", "truncated", "exact"}


def test_random_damage_is_noticed_with_the_reason(make_kv, assert_same, tmp_path):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    kv = make_kv(2, tokens=64)
    data = bytes(encode_chunk(kv))
    path = tmp_path / "x"
    for _ in range(150):
        cut = rng.randrange(len(data))
        path.write_bytes(data[:cut])
        assert outcome(path, kv, assert_same).startswith(("truncated", "header"))
        junk = bytearray(data)
        start = rng.randrange(len(data))
        noise = rng.randbytes(rng.randint(1, 200))[: len(data) - start]
        junk[start : start + len(noise)] = noise
        path.write_bytes(junk)
        if outcome(path, kv, assert_same) == "exact":
            assert bytes(junk) == data
        with pytest.raises(DamagedChunkError):
            _read_row(path, "0" * 64, PlainForm())
        path.write_bytes(rng.randbytes(rng.randrange(500)))
        assert outcome(path, kv, assert_same) != "exact"
    path.write_bytes(data + b"x")
    assert outcome(path, kv, assert_same) == "header: data behind its end"


def test_a_file_of_another_chunk_is_refused(make_kv, assert_same, tmp_path):
    kv, other, foreign = make_kv(1), make_kv(2), make_kv(1, fingerprint="other")
    path = tmp_path / "x"
    path.write_bytes(encode_chunk(other))
    assert outcome(path, kv, assert_same) == "mismatch: the file holds other token ids"
    path.write_bytes(encode_chunk(foreign))
    assert outcome(path, kv, assert_same) == "mismatch: the file holds a chunk of another model or recipe"
    with pytest.raises(DamagedChunkError, match="the key does not belong to this content"):
        _read_row(path, kv.key, PlainForm())


def rewritten(data, **changes):
    """The file with other metadata and a right header checksum."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"] | changes
    del metadata["header"]
    metadata["header"] = chunkfile._header_checksum(metadata)
    text = json.dumps(header | {"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def as_the_first_releases_wrote_it(kv):
    """The same tensors and metadata in safetensors' own order, by its own writer."""
    data = bytes(encode_chunk(kv))
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    tensors = {"token_ids": torch.from_numpy(np.array(kv.token_ids))}
    for index in range(kv.layers):
        tensors |= {f"k.{index}": kv.k[index], f"v.{index}": kv.v[index]}
    return save(tensors, header["__metadata__"])


def test_files_of_the_first_releases_are_read(make_kv, assert_same, tmp_path):
    kv = make_kv(1, tokens=9, dims=((4, 4),) * 12)
    path = tmp_path / "x"
    path.write_bytes(as_the_first_releases_wrote_it(kv))
    assert path.read_bytes() != bytes(encode_chunk(kv))
    assert outcome(path, kv, assert_same) == "exact"
    assert _read_row(path, kv.key, PlainForm()).key == kv.key
    assert not DiskReader(path, row_of(kv)).header.in_order
    path.write_bytes(encode_chunk(kv))
    header = DiskReader(path, row_of(kv)).header
    assert header.in_order
    assert header.layer_range(0)[0] % 64 == 0
    assert header.layer_range(11)[1] == path.stat().st_size


def test_newer_formats_and_unknown_codecs_are_not_called_damage(make_kv, assert_same, tmp_path):
    kv = make_kv(1)
    data = bytes(encode_chunk(kv))
    path = tmp_path / "x"
    path.write_bytes(rewritten(data))
    assert outcome(path, kv, assert_same) == "exact"
    path.write_bytes(rewritten(data, format="2"))
    with pytest.raises(StoreMismatchError, match="has format 2; up to 1 can be read: upgrade blendkv"):
        DiskReader(path, row_of(kv))
    recipe = json.dumps({"kind": "bos", "prefix": [1, 7], "dtype": "bfloat16", "codec": "later"})
    path.write_bytes(rewritten(data, recipe=recipe))
    with pytest.raises(InputError, match="unknown codec 'later'"):
        DiskReader(path, row_of(kv))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{}"])
def test_tiny_files_are_refused(make_kv, assert_same, tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    assert outcome(path, make_kv(1), assert_same).startswith(("truncated", "header"))


def test_a_safetensors_file_of_something_else_is_refused(make_kv, assert_same, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(save({"weight": torch.zeros(3)}, {"made": "elsewhere"}))
    assert outcome(path, make_kv(1), assert_same) == "header: KeyError"


def test_device_errors_become_damage(make_kv, assert_same, tmp_path, monkeypatch):
    kv = make_kv(1)
    path = tmp_path / "x"
    path.write_bytes(encode_chunk(kv))

    def broken(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        assert outcome(path, kv, assert_same) == "unreadable: Input/output error"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        assert outcome(path, kv, assert_same) == "unreadable: Input/output error"


def test_short_reads_are_continued(make_kv, assert_same, tmp_path, monkeypatch):
    kv = make_kv(1)
    path = tmp_path / "x"
    path.write_bytes(encode_chunk(kv))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:3]], offset))
    assert outcome(path, kv, assert_same) == "exact"


def test_truncation_after_opening_is_noticed(make_kv, tmp_path):
    kv = make_kv(1)
    path = tmp_path / "x"
    path.write_bytes(encode_chunk(kv))
    reader = DiskReader(path, row_of(kv))
    os.truncate(path, 10)
    with pytest.raises(DamagedChunkError, match=r"truncated: k\.0 ends after 0 of 80 bytes"):
        reader.layer(0)
