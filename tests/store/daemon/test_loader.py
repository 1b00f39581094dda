"""The order in which chunks come to memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from blendkv.daemon.arena import Arena
from blendkv.daemon.images import Image
from blendkv.daemon.loader import URGENT, Load, Loader
from blendkv.errors import DamagedChunkError

LAYERS = 4


class Header:
    layers = LAYERS


class Source:
    """Notes what is filled; every layer waits for the gate."""

    def __init__(self, key, filled, gate, damaged=None):
        self.key, self.filled, self.gate, self.damaged = key, filled, gate, damaged
        self.closed = False

    def fill(self, index, file):
        assert self.gate.acquire(timeout=60)
        if index == self.damaged:
            raise DamagedChunkError(self.key, "checksum: made so")
        self.filled.append((self.key, index))

    def close(self):
        self.closed = True


@pytest.fixture
def scene(eventually):
    """One thread; loads by key, what was filled in order, what ended how, and the gate."""
    arena, filled, ended, gate, loads = Arena(1 << 20), [], {}, threading.Semaphore(0), {}
    loader = Loader(threads=1)

    def load(key, priority, damaged=None):
        image = Image(key, Header(), np.arange(3), arena.allocate(100), 0)
        source = Source(key, filled, gate, damaged)
        loads[key] = Load(image, source, lambda image, error: ended.update({image.key: error}))
        loader.submit(loads[key], priority)
        return loads[key]

    def finish():
        gate.release(1000)
        eventually(lambda: not loader.pending)
        loader.close()

    yield loader, load, filled, ended, gate, finish
    finish()


def busy(load, gate):
    """Keep the loader's thread at a load of its own, so that what is submitted meanwhile is ordered."""
    load("busy", URGENT + 1)


def test_the_first_layers_of_all_come_first(scene):
    _, load, filled, ended, gate, finish = scene
    busy(load, gate)
    for key in "abc":
        load(key, URGENT)
    load("later", 0)
    finish()
    assert filled[:LAYERS] == [("busy", index) for index in range(LAYERS)]
    assert filled[LAYERS : 4 * LAYERS] == [(key, index) for index in range(LAYERS) for key in "abc"]
    assert filled[4 * LAYERS :] == [("later", index) for index in range(LAYERS)]
    assert ended == dict.fromkeys(["busy", "a", "b", "c", "later"])


def test_what_has_begun_can_be_hastened(scene, eventually):
    """A prefetch that somebody waits for now goes on before others; its old place counts for nothing."""
    loader, load, filled, ended, gate, finish = scene
    for key in "ab":
        load(key, 1)
    gate.release()
    eventually(lambda: filled == [("a", 0)])
    loader.hasten("b", URGENT)
    loader.hasten("nothing", URGENT)
    finish()
    # The thread was at b's first layer, or about to take it: from there on b is first.
    assert [step for step in filled if step[0] == "b"] == [("b", index) for index in range(LAYERS)]
    assert filled.index(("b", LAYERS - 1)) < filled.index(("a", 1))
    assert len(filled) == 2 * LAYERS
    assert not loader.pending
    assert ended == {"a": None, "b": None}


def test_damage_ends_one_load_and_tells_who_waits(scene, eventually):
    _, load, _, ended, _, finish = scene
    bad, good, told = load("bad", 1, damaged=2), load("good", 1), []
    for layer in range(LAYERS):
        bad.image.when(layer, lambda layer=layer: told.append((layer, bad.image.ready > layer)))
    finish()
    assert told == [(0, True), (1, True), (2, False), (3, False)]
    assert (bad.image.ready, bad.source.closed, good.image.whole) == (2, True, True)
    assert ended["bad"].reason == "checksum: made so"
    assert ended["good"] is None
    assert int.from_bytes(bad.image.place._arena.view(bad.image.place.offset + 4096 - 8, 8), "little") == 2


def test_only_what_has_not_begun_can_be_cancelled(scene, eventually):
    loader, load, filled, ended, gate, finish = scene
    load("begun", 1)
    gate.release()
    eventually(lambda: filled)
    waits = load("waits", 0)
    assert not loader.cancel("begun")
    assert loader.cancel("waits")
    assert not loader.cancel("waits")
    assert ended["waits"].reason.startswith("cancelled")
    assert waits.source.closed
    replaced, anew = load("twice", 0), load("twice", 0)
    finish()
    assert (replaced.image.ready, anew.image.whole) == (0, True)
    assert [key for key, _ in filled] == ["begun"] * LAYERS + ["twice"] * LAYERS
