from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blendkv.store import ChunkReader, KVStore
from blendkv.store.filereader import DiskReader
from blendkv.types import ChunkKV


@pytest.fixture(scope="session")
def make_kv() -> Callable[..., ChunkKV]:
    spec = importlib.util.spec_from_file_location("blendkv_store_factory", Path(__file__).with_name("factory.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_kv


@pytest.fixture(scope="session")
def assert_same() -> Callable[[ChunkReader, ChunkKV], None]:
    def check(reader: ChunkReader, kv: ChunkKV) -> None:
        assert (reader.key, reader.recipe, reader.fingerprint) == (kv.key, kv.recipe, kv.fingerprint)
        assert (reader.layers, reader.nbytes) == (kv.layers, kv.nbytes)
        assert np.array_equal(reader.token_ids, kv.token_ids)
        for index in range(kv.layers):
            for found, expected in zip(reader.layer(index), kv.layer(index), strict=True):
                assert found.dtype == expected.dtype
                assert found.shape == expected.shape
                # Bytes, not values: a NaN must come back as well.
                assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))

    return check


@pytest.fixture
def disk_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(key, layer) of every layer that is read from disk."""
    reads: list[tuple[str, int]] = []
    read = DiskReader.layer

    def layer(self: DiskReader, index: int) -> object:
        reads.append((self.key, index))
        return read(self, index)

    monkeypatch.setattr(DiskReader, "layer", layer)
    return reads


@pytest.fixture
def assert_holds(assert_same: Callable[[ChunkReader, ChunkKV], None]) -> Callable[[KVStore, ChunkKV], None]:
    """Assert that ``kv`` is in the store and comes back exactly."""

    def check(store: KVStore, kv: ChunkKV) -> None:
        assert store.contains(kv.key, kv.token_ids)
        reader = store.get(kv.key, kv.token_ids)
        assert reader is not None
        assert_same(reader, kv)

    return check
