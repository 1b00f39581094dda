"""A run of tokens of a chunk KV is a chunk KV of its own."""

from __future__ import annotations

import threading

import pytest
import torch

from blendkv.blend.layout import lay_out
from blendkv.errors import InputError
from blendkv.library import materialise
from blendkv.matching import SlicedReader
from blendkv.store import ChunkReader, KVStore, LayerPrefetcher, LoadingReader
from blendkv.types import ChunkKV, Prompt, Recipe, Segment, as_token_ids

LAYERS = 3


@pytest.fixture
def kv(text):
    def tensors(dim):
        return tuple(torch.randn(40, 2, dim) for _ in range(LAYERS))

    return ChunkKV("model", Recipe("bos", (1,), "float32"), as_token_ids(text(40)), tensors(4), tensors(6))


def test_it_is_the_rows_of_the_whole(kv):
    piece = SlicedReader(kv, 3, 38)
    assert isinstance(piece, ChunkReader)
    assert (piece.layers, piece.fingerprint) == (LAYERS, "model")
    assert piece.token_ids.tolist() == kv.token_ids[3:38].tolist()
    for index in range(LAYERS):
        for found, whole in zip(piece.layer(index), kv.layer(index), strict=True):
            assert torch.equal(found, whole[3:38])
    alone = materialise(piece)
    assert (alone.key, alone.nbytes) == (piece.key, piece.nbytes)
    assert piece.key != kv.key
    assert SlicedReader(kv, 0, 40).key == kv.key
    with pytest.raises(IndexError):
        piece.layer(LAYERS)


@pytest.mark.parametrize("span", [(-1, 5), (0, 41), (7, 7), (8, 7)])
def test_a_run_outside_the_chunk_is_refused(kv, span):
    with pytest.raises(InputError, match=r"it has 40: give 0 <= start < stop <= tokens"):
        SlicedReader(kv, *span)


def test_it_is_exact_only_behind_the_tokens_it_was_computed_behind(kv):
    piece = SlicedReader(kv, 2, 40)
    first, second = kv.token_ids[:2].tolist()
    assert piece.recipe == Recipe("bos", (1, first, second), "float32")
    assert SlicedReader(piece, 1, 9).recipe.prefix == (1, *kv.token_ids[:3].tolist())
    for before, exact in (([1, first, second], True), ([1, first, 2], False), ([1], False), ([1, 5, first], False)):
        prompt = Prompt(
            (
                Segment("system", as_token_ids(before)),
                Segment("chunk", piece.token_ids),
                Segment("query", as_token_ids([9])),
            )
        )
        assert lay_out(prompt, [None, piece, None]).spans[1].exact == exact
    assert SlicedReader(kv, 0, 30).recipe == kv.recipe


def test_only_a_slice_of_a_loading_reader_loads(tmp_path, kv):
    assert not isinstance(SlicedReader(kv, 1, 9), LoadingReader)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv)
        reader = store.get(kv.key, kv.token_ids)
        piece = SlicedReader(reader, 1, 9)
        assert isinstance(piece, LoadingReader)
        piece.readahead(0)
        piece.layer(0)
        assert piece.bytes_read == reader.bytes_read == kv.nbytes // LAYERS
        with LayerPrefetcher([piece, SlicedReader(kv, 2, 5)], LAYERS) as prefetcher:
            assert any(thread.name == "blendkv-prefetch" for thread in threading.enumerate())
            for index in range(LAYERS):
                disk, memory = prefetcher.layer(index)
                assert torch.equal(disk[0], kv.k[index][1:9])
                assert torch.equal(memory[1], kv.v[index][2:5])
    with LayerPrefetcher([SlicedReader(kv, 2, 5)], LAYERS) as prefetcher:
        assert not any(thread.name == "blendkv-prefetch" for thread in threading.enumerate())
        assert torch.equal(prefetcher.layer(0)[0][0], kv.k[0][2:5])
