"""Stores and daemons on several machines, joined by what they share: a Redis server, a bucket."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.server import Daemon
from blendkv.errors import DamagedChunkError, InputError, TierUnavailableError, UnavailableChunkError
from blendkv.store import KVStore, LayerPrefetcher
from blendkv.store.guard import GuardedTier

DIMS = ((8, 8),) * 11
PATIENCE = 20.0


@pytest.fixture
def machine(tmp_path, url_of):
    """Opens the store of another machine over shared places; everything is closed with the test."""
    with contextlib.ExitStack() as stack:

        def open_store(name, *urls, daemon=False, memory_bytes=1 << 24):
            if not daemon:
                return stack.enter_context(
                    KVStore.open(tmp_path / name, memory_bytes=memory_bytes, remotes=urls, namespace=tmp_path.name)
                )
            served = stack.enter_context(Daemon(tmp_path / name, memory_bytes, remotes=urls, namespace=tmp_path.name))
            thread = threading.Thread(target=served.serve)
            thread.start()
            stack.callback(thread.join)
            stack.callback(served.stop)
            return stack.enter_context(contextlib.closing(DaemonStore(tmp_path / name, PATIENCE)))

        yield open_store


def uploaded(store, chunks):
    end = time.monotonic() + 60
    while store.stat().uploaded < chunks:
        assert time.monotonic() < end
        assert not store.stat().not_uploaded
        time.sleep(0.01)


def assert_equal(reader, kv):
    for index in range(kv.layers):
        assert all(map(torch.equal, reader.layer(index), kv.layer(index)))


@pytest.mark.parametrize("daemons", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("kind", ["redis", "s3", "az"])
def test_two_machines_see_each_others_chunks(machine, url_of, make_kv, kind, daemons):
    url = url_of(kind)
    one, two = (machine(name, url, daemon=daemon) for name, daemon in zip("ab", daemons, strict=True))
    kvs = [make_kv(number, tokens=number + 20, dims=DIMS) for number in range(3)]
    for kv in kvs:
        one.put(kv)
    uploaded(one, 3)
    for kv in kvs:
        assert two.contains(kv.key, kv.token_ids)
        assert not two.in_memory(kv.key)
        assert two.get(kv.key, kvs[(kv is kvs[0])].token_ids) is None  # another chunk's token ids
        reader = two.get(kv.key, kv.token_ids)
        with LayerPrefetcher([reader], kv.layers) as layers:
            for index in range(kv.layers):
                assert all(map(torch.equal, layers.layer(index)[0], kv.layer(index)))
    missing = make_kv(99, dims=DIMS)
    assert not two.contains(missing.key, missing.token_ids)
    assert two.get(missing.key, missing.token_ids) is None
    end = time.monotonic() + 60
    while len(two.ls()) < 3:  # what has come is kept
        assert time.monotonic() < end
        time.sleep(0.01)
    assert two.stat().uploaded == 0
    assert two.remove(kvs[0].key)
    assert one.contains(kvs[0].key, kvs[0].token_ids)  # its own copy


def test_each_layer_comes_from_the_first_tier_that_gives_it(machine, url_of, make_kv, redis_server, tmp_path):
    kv = make_kv(1, tokens=20, dims=DIMS)
    urls = url_of("redis"), url_of("file")
    one = machine("a", *urls)
    one.put(kv)
    uploaded(one, 2)
    two = machine("b", *urls, memory_bytes=0)
    reader = two.get(kv.key, kv.token_ids)
    assert all(map(torch.equal, reader.layer(0), kv.layer(0)))
    first = reader.tier
    if first == "redis":
        with redis_server.client() as client:
            for key in client.scan_iter(f"*{kv.key}*"):
                client.delete(key)
    else:
        for path in (tmp_path / "shared").rglob(f"*{kv.key}*"):
            path.unlink()
    if first == "redis":  # the file is behind it in the order
        assert_equal(reader, kv)
        assert reader.tier == "file"
    else:
        with pytest.raises(UnavailableChunkError):
            assert_equal(reader, kv)


def test_a_tier_that_dies_while_it_is_read_costs_the_chunk_only(machine, url_of, make_kv, monkeypatch):
    kv = make_kv(1, tokens=20, dims=DIMS)
    url = url_of("file")
    one = machine("a", url)
    one.put(kv)
    uploaded(one, 1)
    fetch = GuardedTier.fetch

    def dead(self, head, first, into):
        if first:
            raise TierUnavailableError("remote tier file is not available: test")
        fetch(self, head, first, into)

    monkeypatch.setattr(GuardedTier, "fetch", dead)
    for name, daemon in (("b", False), ("c", True)):
        two = machine(name, url, daemon=daemon)
        reader = two.get(kv.key, kv.token_ids)
        assert all(map(torch.equal, reader.layer(0), kv.layer(0)))
        with pytest.raises(UnavailableChunkError, match="cannot be read to its end"):
            reader.layer(5)
        two.put(kv)
        assert_equal(two.get(kv.key, kv.token_ids), kv)


def test_damage_in_a_tier_is_noticed(machine, url_of, make_kv, tmp_path):
    kv = make_kv(1, tokens=20, dims=DIMS)
    url = url_of("file")
    one = machine("a", url)
    one.put(kv)
    uploaded(one, 1)
    (path,) = (p for p in (tmp_path / "shared").rglob("*") if p.is_file() and kv.key in str(p))
    data = bytearray(path.read_bytes())
    data[len(data) - 1] ^= 1
    path.write_bytes(data)
    reader = machine("b", url).get(kv.key, kv.token_ids)
    with pytest.raises(DamagedChunkError, match=r"damaged|cannot be read"):
        assert_equal(reader, kv)


def test_a_store_in_memory_only_has_no_remote_tier():
    with pytest.raises(InputError, match="remote tiers were given for a store in memory only"):
        KVStore.open(None, memory_bytes=1, remotes=["memory://x"])
