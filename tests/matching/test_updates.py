"""The finder follows the index: new and removed chunks, of this process and of others."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blendkv.errors import StoreError
from blendkv.matching import ChunkFinder, finder
from blendkv.store import KVStore
from blendkv.store.index import Index
from blendkv.types import ChunkKV, Recipe, as_token_ids


class CountingIndex:
    """An index that counts the entries it is asked for, whole listings, and changes it tells of."""

    def __init__(self, index):
        self.inner, self.asked, self.listed, self.changes = index, 0, 0, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def entries(self, keys):
        self.asked += len(keys)
        return self.inner.entries(keys)

    def changed_since(self, tick, tenant=None):
        changed = self.inner.changed_since(tick, tenant)
        self.changes += len(changed)
        return changed

    def keys(self, *, tenant=None):
        self.listed += 1
        return self.inner.keys(tenant=tenant)


def kv_of(ids):
    k, v = torch.zeros(len(ids), 1, 2), torch.ones(len(ids), 1, 2)
    return ChunkKV("model", Recipe("bos", (1,), "float32"), as_token_ids(ids), (k,), (v,))


def put(path, ids):
    with KVStore.open(path, memory_bytes=0) as store:
        store.put(kv_of(ids))


def test_a_store_and_another_process(tmp_path, text):
    one, other = text(40), text(50)
    prompt = [1, *one, *other]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        found = ChunkFinder(store, "model", "float32", 1)
        found.refresh()
        assert found.find(prompt) == []
        store.put(kv_of(one))
        assert found.find(prompt) == []
        found.refresh()
        assert [(m.start, m.stop) for m in found.find(prompt)] == [(1, 41)]
        process = multiprocessing.get_context("spawn").Process(target=put, args=(tmp_path / "s", other))
        process.start()
        process.join(120)
        assert process.exitcode == 0
        found.refresh()
        first, second = found.find(prompt)
        assert (first.start, first.stop, second.start, second.stop) == (1, 41, 41, 91)
        for match in (first, second):
            assert store.get(match.key, match.token_ids) is not None
        store.remove(first.key)
        assert found.find(prompt) == [second]  # at once: the index is asked at every match
        found.refresh()
        assert len(found) == 1
        store.put(kv_of(one))
        found.refresh()
        assert found.find(prompt) == [first, second]


def test_memory_only_and_closed_stores(tmp_path, text):
    chunk = text(40)
    with KVStore.open(None, memory_bytes=1 << 20) as store:
        store.put(kv_of(chunk))
        found = ChunkFinder(store, "model", "float32", 1)
        found.refresh()
        assert found.find(chunk) == []
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv_of(chunk))
        found = ChunkFinder(store, "model", "float32", 1)
        found.refresh()
    for call in (found.refresh, lambda: found.find(chunk)):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_refresh_reads_new_chunks_only(world, text):
    index = CountingIndex(world.index)
    world.finder = ChunkFinder(SimpleNamespace(index=index), "model", "float32", world.bos)
    keys = world.add(*(text(40) for _ in range(50)))
    world.add(text(40), fingerprint="other")
    world.finder.refresh()
    assert (index.asked, len(world.finder)) == (51, 50)
    world.finder.refresh()
    for key in keys[:20]:  # every use changes the index
        world.index.touch(key)
    world.index.flush_touches()
    world.finder.refresh()
    assert index.asked == 51
    world.add(text(40))
    world.finder.refresh()
    assert (index.asked, len(world.finder), index.listed) == (52, 51, 0)
    assert index.changes == 51 + 20 + 1


def test_nothing_is_read_when_nothing_was_written(world, text, monkeypatch):
    world.add(text(40))
    world.finder.refresh()
    monkeypatch.setattr(world.index, "changed_since", None)  # a call would raise
    world.finder.refresh()
    assert len(world.finder) == 1


def test_removed_chunks_are_dropped_together(world, text):
    chunks = [text(40) for _ in range(64)]
    keys = world.add(*chunks)
    world.finder.refresh()
    assert 64 * 68 <= world.finder.nbytes <= 64 * 200  # not the token ids, which are 160 bytes more
    world.remove(*keys[:4])
    world.finder.refresh()
    assert len(world.finder) == 64  # 4 of 64: not worth a sweep
    for number in (0, 3, 4):
        assert len(world.find([1, *chunks[number]])) == (number > 3)
    assert world.finder.counts.gone == 2
    world.remove(keys[4])
    world.finder.refresh()
    assert len(world.finder) == 59
    assert world.find([1, *chunks[4], *chunks[5]])[0].key == keys[5]
    assert world.finder.counts.gone == 2
    world.remove(*keys)
    world.finder.refresh()
    assert (len(world.finder), world.finder.nbytes) == (0, 0)
    world.add(chunks[0])
    assert len(world.find([1, *chunks[0]])) == 1


def test_another_chunk_takes_the_place_of_one_that_is_gone(world, text):
    index = CountingIndex(world.index)
    world.finder = ChunkFinder(SimpleNamespace(index=index), "model", "float32", world.bos)
    whole = text(120)
    keys = world.add(whole, *(whole[:n] for n in range(110, 40, -10)))
    world.finder.refresh()
    for number in range(3):
        index.asked = 0
        assert [m.key for m in world.finder.find([1, *whole])] == [keys[number]]
        assert index.asked == number + 1  # what is gone is asked for, and not all that overlaps it
        world.remove(keys[number])


def test_recipes_without_chunks_are_forgotten(world, text):
    chunk = text(40)
    prefixes = [text(9) for _ in range(3)]
    keys = [world.add(chunk, recipe=world.behind(prefix))[0] for prefix in prefixes]
    world.add(*prefixes, recipe=world.start)
    world.finder.refresh()
    world.remove(keys[0], keys[1])
    for prefix in prefixes[:2]:
        assert [m.kind for m in world.find([*prefix, *chunk])] == []
    found = world.find([*prefixes[2], *chunk])
    assert [(m.kind, m.start) for m in found] == [("system", 0), ("chunk", 9)]
    assert found[1].key == keys[2]
    world.add(chunk, recipe=world.behind(prefixes[0]))
    assert [m.kind for m in world.find([*prefixes[0], *chunk])] == ["system", "chunk"]


@pytest.mark.parametrize("sizes", [(3, 4, 2, 9, 1, 1, 30, 2), (40, 1)])
def test_few_and_many_additions(world, text, monkeypatch, sizes):
    monkeypatch.setattr(finder, "_RECENT", 8)
    monkeypatch.setattr(finder, "_BATCH", 7)
    chunks = []
    for size in sizes:
        chunks += [text(40 + n) for n in range(size)]
        world.add(*chunks[-size:])
        world.finder.refresh()
        assert len(world.finder) == len(chunks)
    prompt, expected = [1], []
    for chunk in chunks:
        expected.append((len(prompt), len(prompt) + len(chunk), 0))
        prompt += chunk
    assert world.spans(prompt) == expected


def test_a_failed_refresh_is_made_up_for(world, text, monkeypatch):
    chunks = [text(40) for _ in range(3)]
    world.add(chunks[0])
    world.finder.refresh()
    world.add(*chunks[1:])

    def fail(keys):
        raise StoreError("no index")

    with monkeypatch.context() as patch:
        patch.setattr(world.index, "entries", fail)
        with pytest.raises(StoreError):
            world.finder.refresh()
        with pytest.raises(StoreError):
            world.finder.find([1, *chunks[0]])
    assert len(world.find([1, *chunks[0], *chunks[1], *chunks[2]])) == 3


def test_a_chunk_that_goes_while_it_is_read_is_found_when_it_comes_back(world, text, monkeypatch):
    chunk = text(40)
    world.add(chunk)
    entries = world.index.entries
    with monkeypatch.context() as patch:
        patch.setattr(world.index, "entries", lambda keys: [])
        world.finder.refresh()
    assert entries == world.index.entries
    assert world.find([1, *chunk]) == []
    world.index.touch(world.add(chunk)[0])
    world.index.flush_touches()
    assert len(world.find([1, *chunk])) == 1


def test_the_index_lists_entries(tmp_path, world, text, monkeypatch):
    monkeypatch.setattr("blendkv.store.index._KEYS_PER_QUERY", 3)
    chunks = [text(n) for n in range(1, 9)]
    keys = world.add(*chunks)
    entries = {entry.key: entry for entry in world.index.entries([*keys, "0" * 64])}
    assert entries.keys() == set(keys)
    for key, chunk in zip(keys, chunks, strict=True):
        ids = entries[key].token_ids
        assert (ids.tolist(), ids.dtype, ids.flags.writeable) == (chunk, np.int32, False)
        assert (entries[key].fingerprint, entries[key].recipe) == ("model", world.plain)
    assert world.index.entries([]) == []
    assert world.index.count() == 8
    before = world.index.version()
    assert world.index.version() == before
    other = Index(tmp_path / "index.sqlite")
    other.close()
    assert world.index.version() == before
    world.remove(keys[0])
    assert world.index.version() != before
    assert world.index.count() == 7
