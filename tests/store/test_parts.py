"""Protocols, policy, codec, memory tier and input checks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from blendkv.errors import InputError, StoreFullError
from blendkv.market.classic import LruPolicy
from blendkv.store import CODECS, POLICIES, ChunkReader, KVStore, LoadingReader
from blendkv.store.chunkfile import header_bytes, parse_header
from blendkv.store.memory import MemoryTier
from blendkv.store.normalise import normalised
from blendkv.store.tensors import cut_layers, encode_chunk, tensor_of
from blendkv.types import ChunkKV, Recipe


def test_chunk_kv_is_a_chunk_reader_that_loads_nothing(make_kv):
    assert isinstance(make_kv(1), ChunkReader)
    assert not isinstance(make_kv(1), LoadingReader)


def test_readers_from_disk_are_loading_readers(make_kv, tmp_path):
    kv = make_kv(1)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv)
        assert isinstance(store.get(kv.key, kv.token_ids), LoadingReader)
        assert isinstance(store._disk.get(kv.key), LoadingReader)


def test_raw_codec_returns_the_same_bits():
    k, v = torch.randn(2, 1, 3), torch.tensor([[[float("nan")]]])
    codec = CODECS.get("raw")
    parts = codec.encode(k, v)
    assert tuple(parts) == codec.parts
    assert codec.decode(parts, "float32") == (k, v)


def test_unknown_names_list_what_is_allowed(tmp_path):
    with pytest.raises(InputError, match=r"unknown eviction policy 'random'; allowed: .*lru"):
        KVStore.open(tmp_path / "s", memory_bytes=1, policy="random")
    assert not (tmp_path / "s").exists()
    assert {"lru", "arc", "market"} <= set(POLICIES.names())


@pytest.mark.parametrize("limits", [{"memory_bytes": -1}, {"memory_bytes": 1, "disk_bytes": -5}])
def test_negative_limits_are_refused(tmp_path, limits):
    with pytest.raises(InputError, match="give 0 or more bytes"):
        KVStore.open(tmp_path / "s", **limits)


def test_memory_evicts_the_least_recently_used(make_kv):
    a, b, c = make_kv(1), make_kv(2), make_kv(3)
    tier = MemoryTier(2 * a.nbytes, LruPolicy(2 * a.nbytes))
    tier.put(a)
    tier.put(b)
    tier.get(a.key)
    tier.put(c)
    assert [tier.contains(kv.key) for kv in (a, b, c)] == [True, False, True]
    tier.put(a)  # again: nothing new, but a use
    tier.put(b)
    assert [tier.contains(kv.key) for kv in (a, b, c)] == [True, True, False]
    stat = tier.stat()
    assert (stat.chunks, stat.bytes, stat.evictions) == (2, 2 * a.nbytes, {"limit": 2})


def test_memory_evicts_around_pins(make_kv):
    a, b, c = make_kv(1), make_kv(2), make_kv(3)
    tier = MemoryTier(2 * a.nbytes, LruPolicy(2 * a.nbytes))
    tier.put(a)
    tier.put(b)
    tier.pin([a.key])
    tier.put(c)
    assert [tier.contains(kv.key) for kv in (a, b, c)] == [True, False, True]


def test_memory_respects_pins_and_refuses_without_evicting(make_kv):
    a, b = make_kv(1), make_kv(2)
    big = make_kv(3, tokens=10)
    tier = MemoryTier(2 * a.nbytes, LruPolicy(2 * a.nbytes))
    tier.pin([a.key])
    tier.put(a)
    tier.put(b)
    assert not tier.fits(big.nbytes)
    with pytest.raises(StoreFullError, match="pinned or in use; raise the limit or unpin some"):
        tier.put(big)
    assert tier.contains(a.key)
    assert tier.contains(b.key)
    tier.unpin([a.key])
    assert tier.fits(big.nbytes)
    tier.put(big)
    assert [kv.key for kv in tier.chunks()] == [big.key]
    assert tier.delete(big.key)
    assert not tier.delete(big.key)
    assert tier.stat().bytes == 0


def test_normalised_keeps_what_is_fine_and_copies_views(make_kv, assert_same):
    kv = make_kv(1)
    assert normalised(kv) is kv
    base = torch.randn(3, 100, 2, 4)
    view = base[1, 10:15]
    strided = torch.randn(2, 5, 4).transpose(0, 1)
    trained = torch.randn(5, 2, 4).requires_grad_()
    recipe = Recipe("bos", (), "float32")
    odd = ChunkKV("model", recipe, kv.token_ids, (view, strided), (trained, torch.randn(5, 2, 4)))
    held = normalised(odd)
    assert_same(held, odd)
    for tensor in (*held.k, *held.v):
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert held.v[1] is odd.v[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, 2, 3, 4, 5]}, "int32 array"),
        ({"token_ids": torch.zeros(5).numpy()}, "int32 array"),
        ({"token_ids": torch.zeros(0, dtype=torch.int32).numpy()}, "at least one id"),
        ({"k": ()}, "K of 0 layers and V of 2"),
        ({"v": (torch.zeros(5, 2, 4, dtype=torch.bfloat16),)}, "K of 2 layers and V of 1"),
        (
            {"k": (torch.zeros(4, 2, 4, dtype=torch.bfloat16),) * 2},
            r"K of layer 0 has shape \(4, 2, 4\).*with 5 tokens",
        ),
        ({"v": (torch.zeros(5, 8, dtype=torch.bfloat16),) * 2}, "V of layer 0 has shape"),
        ({"k": (torch.zeros(5, 2, 4),) * 2}, "torch.float32, the recipe says 'bfloat16'"),
        ({"recipe": Recipe("bos", (), "bfloat16", "zip")}, "unknown codec 'zip'; allowed: raw"),
    ],
)
def test_wrong_chunks_are_refused(make_kv, change, message):
    kv = make_kv(1)
    fields = {name: getattr(kv, name) for name in ("fingerprint", "recipe", "token_ids", "k", "v")} | change
    with KVStore.open(None, memory_bytes=1000) as store:
        with pytest.raises(InputError, match=message):
            store.put(ChunkKV(**fields))
        assert store.ls() == []


@pytest.mark.parametrize("codec", CODECS.names())
def test_layers_cut_together_are_those_cut_one_by_one(make_kv, codec):
    """Tensors over the memory of the file: equal to `decode_layer`'s, and they follow what is written there later."""
    kv = make_kv(1, tokens=6, dims=((64, 64),) * 3)
    kv = replace(kv, recipe=replace(kv.recipe, codec=codec))
    file = encode_chunk(kv)
    header = parse_header(file[: header_bytes(file[:8], len(file), kv.key)], len(file), kv.key)
    later = np.zeros(len(file), dtype=np.uint8)
    found = cut_layers(later.data, header)
    assert found is not None
    later[:] = np.frombuffer(file, dtype=np.uint8)
    for index, parts in enumerate(found):
        spans = header.layer(index)
        assert parts.keys() == spans.keys()
        for part, span in spans.items():
            one = tensor_of(span, later.data[span.start : span.start + span.size])
            assert (parts[part].dtype, parts[part].shape) == (one.dtype, one.shape)
            assert parts[part].is_contiguous()
            assert parts[part].data_ptr() == one.data_ptr()
    shifted = np.zeros(len(file) + 1, dtype=np.uint8)[1:]
    assert (cut_layers(shifted.data, header) is None) == any(p.dtype.itemsize > 1 for p in found[0].values())


def test_layers_that_differ_are_not_cut_together(make_kv):
    kv = make_kv(1)  # its layers have other head dims
    file = encode_chunk(kv)
    header = parse_header(file[: header_bytes(file[:8], len(file), kv.key)], len(file), kv.key)
    assert not header.uniform
    assert cut_layers(file, header) is None
