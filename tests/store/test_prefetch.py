"""The prefetcher: reads ahead, in bounds, and tells of errors where they belong."""

from __future__ import annotations

import threading

import pytest
import torch

from blendkv.errors import DamagedChunkError, InputError
from blendkv.store import KVStore, LayerPrefetcher

LAYERS = 6


class SlowReader:
    """A reader from disk whose layers are let through one by one."""

    token_ids = recipe = fingerprint = None
    tier = "disk"

    def __init__(self, key="slow", layers=LAYERS, gated=True):
        self.key, self.layers, self.nbytes = key, layers, 10 * layers
        self.started = [threading.Event() for _ in range(layers)]
        self.gates = [threading.Event() for _ in range(layers)]
        self.done = [threading.Event() for _ in range(layers)]
        self.errors = {}
        self.advised = []
        self.bytes_read = 0
        if not gated:
            for gate in self.gates:
                gate.set()

    def layer(self, index):
        self.started[index].set()
        assert self.gates[index].wait(30)
        if index in self.errors:
            raise self.errors[index]
        self.bytes_read += 10
        self.done[index].set()
        return torch.tensor(index), torch.tensor(-index)

    def readahead(self, index):
        self.advised.append(index)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "blendkv-prefetch"]


def test_the_next_layers_are_read_while_the_consumer_computes():
    reader = SlowReader()
    with LayerPrefetcher([reader], LAYERS, depth=2) as prefetcher:
        reader.gates[0].set()
        assert prefetcher.layer(0)[0][0] == 0
        # Nobody asks for layer 1 or 2 here: only a thread of the prefetcher can start them.
        assert reader.started[1].wait(30)
        reader.gates[1].set()
        assert reader.started[2].wait(30)
        reader.gates[2].set()
        assert reader.done[2].wait(30)
        # Two layers wait for the consumer: that is the depth, so the third is not started.
        assert not reader.started[3].wait(0.05)
        assert prefetcher.layer(1)[0][0] == 1
        assert reader.started[3].wait(30)
        assert prefetcher.bytes_loaded == 30
        for gate in reader.gates:
            gate.set()
    assert threads() == []


def test_the_consumer_waits_for_a_layer_that_is_being_read():
    reader = SlowReader()
    with LayerPrefetcher([reader], LAYERS) as prefetcher:
        assert reader.started[0].wait(30)
        timer = threading.Timer(0.05, reader.gates[0].set)
        timer.start()
        assert prefetcher.layer(0)[0][0] == 0
        assert prefetcher.wait_seconds > 0
        for gate in reader.gates:
            gate.set()


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_every_order_gives_the_right_layers(depth):
    readers = [SlowReader(gated=False), SlowReader(gated=False)]
    orders = [*range(LAYERS), *range(LAYERS), 3, 3, 1, 5, 0, 2, 4, 5, *range(LAYERS)]
    with LayerPrefetcher(readers, LAYERS, depth=depth) as prefetcher:
        for index in orders:
            pairs = prefetcher.layer(index)
            assert [(int(k), int(v)) for k, v in pairs] == [(index, -index)] * 2
        for index in (-1, LAYERS):
            with pytest.raises(IndexError):
                prefetcher.layer(index)
    assert all(set(reader.advised) == set(range(LAYERS)) for reader in readers)


def test_memory_alone_needs_no_thread(make_kv):
    kvs = [make_kv(1), make_kv(2)]
    with LayerPrefetcher(kvs, 2) as prefetcher:
        assert threads() == []
        assert prefetcher.layer(1) == [kv.layer(1) for kv in kvs]
        assert prefetcher.bytes_loaded == 0
        assert prefetcher.wait_seconds == 0
    with LayerPrefetcher([], 2) as prefetcher:
        assert prefetcher.layer(0) == []


def test_an_error_surfaces_at_its_layer_and_can_be_asked_again():
    good, bad = SlowReader(gated=False), SlowReader(gated=False)
    bad.errors[2] = DamagedChunkError("slow", "checksum: k.2 was altered")
    with LayerPrefetcher([good, bad], LAYERS) as prefetcher:
        prefetcher.layer(0)
        prefetcher.layer(1)
        for _ in range(2):
            with pytest.raises(DamagedChunkError, match=r"k\.2"):
                prefetcher.layer(2)
        assert not bad.started[3].is_set()
        assert int(prefetcher.layer(3)[1][0]) == 3
        del bad.errors[2]
        assert [int(prefetcher.layer(index)[1][0]) for index in range(LAYERS)] == list(range(LAYERS))


def test_unexpected_errors_surface_as_well():
    reader = SlowReader(gated=False)
    reader.errors[0] = ZeroDivisionError()
    with LayerPrefetcher([reader], LAYERS) as prefetcher, pytest.raises(ZeroDivisionError):
        prefetcher.layer(0)


def test_closing_early_ends_the_thread_and_further_use_is_refused(make_kv):
    for readers in ([SlowReader(layers=2, gated=False)], [make_kv(1)]):
        prefetcher = LayerPrefetcher(readers, 2)
        prefetcher.close()
        prefetcher.close()
        assert threads() == []
        with pytest.raises(InputError, match="closed; make a new one"):
            prefetcher.layer(0)


def test_wrong_input_is_refused(make_kv):
    with pytest.raises(InputError, match="has 2 layers and the model 3; use chunk KVs of this model"):
        LayerPrefetcher([make_kv(1)], 3)
    with pytest.raises(InputError, match="prefetch depth 0 is not allowed; give 1 or more"):
        LayerPrefetcher([make_kv(1)], 2, depth=0)
    assert threads() == []


def test_with_a_store_the_disk_is_read_once(tmp_path, make_kv, disk_reads):
    kvs = [make_kv(number, tokens=number + 1) for number in range(4)]
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        for kv in kvs:
            store.put(kv)
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        store.put(kvs[0])  # one from memory, the rest from disk
        readers = [store.get(kv.key, kv.token_ids) for kv in kvs]
        with LayerPrefetcher(readers, 2) as prefetcher:
            for _ in range(2):
                for index in range(2):
                    for pair, kv in zip(prefetcher.layer(index), kvs, strict=True):
                        assert torch.equal(pair[0], kv.k[index])
                        assert torch.equal(pair[1], kv.v[index])
            assert prefetcher.bytes_loaded == sum(kv.nbytes for kv in kvs[1:])
        assert store.stat().promoted == 3
    assert len(disk_reads) == 6


def test_damage_on_disk_reaches_the_consumer(tmp_path, make_kv):
    kv = make_kv(1)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(kv)
        path = next((tmp_path / "s").rglob("*.safetensors"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with LayerPrefetcher([store.get(kv.key, kv.token_ids)], 2) as prefetcher:
            prefetcher.layer(0)
            with pytest.raises(DamagedChunkError):
                prefetcher.layer(1)
        assert store.stat().discarded == {"checksum": 1}
