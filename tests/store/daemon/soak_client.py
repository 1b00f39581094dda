"""Clients of the crash run: one process imports everything and forks them, so that a killed one is soon back.

Reads one line per client from its input, ``<name> <kind> <store> <seed> <numbers> <deadline>``, and forks a child that
works until it is killed, or ended by SIGTERM. Every line of a child begins with its name:

``pid <n>``, ``put <number>`` (it returned), ``removing <number>``, ``removed <number>``, ``ok <when> <calls>`` (the
daemon served it, so many times since the last of these lines), ``took <what> <begun> <ended>`` (longer than `SLOW`
seconds), ``unavailable`` (the rest of a chunk did not come), ``ended``, and what must never happen: ``failed <why>``,
``refused <why>``.

Kinds: ``engine`` reads chunks, compares every byte with what it must be, and keeps some, or only their tensors, to
compare them again later; ``putter`` stores and removes even numbers; ``ingest`` stores odd ones in the background.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import deque
from functools import lru_cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from factory import make_kv

from blendkv.daemon.client import DaemonStore
from blendkv.errors import StoreError, UnavailableChunkError

DIMS = ((8, 8),) * 15 + ((16, 8),)
SLOW = 1.0
_KEPT = 4  # readers that an engine holds at most


@lru_cache(maxsize=256)
def chunk(number):
    """Chunk ``number``: what it must be, whoever asks; 21 to 264 KB."""
    return make_kv(number, tokens=20 + number * 37 % 230, dims=DIMS)


def same(found, expected):
    """Whether two layers are equal, byte by byte."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, expected, strict=True))


class Client:
    """What the kinds have in common."""

    def __init__(self, name, root, seed, numbers, deadline):
        self.name = name
        self.rng = random.Random(seed)
        self.numbers = numbers
        self.ending = False
        self._told, self._calls = 0.0, 0
        signal.signal(signal.SIGTERM, self._end)
        self.store = DaemonStore(Path(root), deadline)

    def _end(self, *_):
        self.ending = True

    def tell(self, line):
        os.write(1, f"{self.name} {line}\n".encode())

    def served(self):
        """The daemon did something for this client."""
        now = time.monotonic()
        self._calls += 1
        if now - self._told > 0.1:
            self.tell(f"ok {now} {self._calls}")
            self._told, self._calls = now, 0

    @contextlib.contextmanager
    def timed(self, what):
        begun = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            if ended - begun > SLOW:
                self.tell(f"took {what} {begun} {ended}")

    def run(self):
        while not self.ending:
            self.step()
        self.finish()
        self.store.close()


class Engine(Client):
    """Reads, compares, keeps, compares again."""

    def __init__(self, *args):
        super().__init__(*args)
        self._kept = deque()  # (number, {layer: tensors}, reader or None, when to compare again)

    def step(self):
        action = self.rng.random()
        if action < 0.75:
            self._get(self.rng.randrange(self.numbers))
        elif action < 0.85:
            self._look()
        elif self._kept and self._kept[0][-1] < time.monotonic():
            self._compare_again()
        time.sleep(self.rng.uniform(0, 0.01))

    def finish(self):
        while self._kept:
            self._compare_again()
        gc.collect()

    def _get(self, number):
        kv = chunk(number)
        with self.timed("get"):
            try:
                reader = self.store.get(kv.key, kv.token_ids)
            except StoreError as error:  # the daemon says why; a library computes the chunk instead
                self.tell(f"refused {error}")
                return
        if reader is None:
            return
        layers = {}
        try:
            for index in range(kv.layers):
                with self.timed("layer"):
                    layers[index] = reader.layer(index)
                assert same(layers[index], kv.layer(index)), f"chunk {number} layer {index} is another"
        except UnavailableChunkError:
            self.tell("unavailable")
        self.served()
        if len(self._kept) < _KEPT:  # for longer than most stops take: a daemon that was slow must not forget them
            due = time.monotonic() + self.rng.uniform(0, 3)
            self._kept.append((number, layers, reader if self.rng.random() < 0.5 else None, due))

    def _compare_again(self):
        number, layers, reader, _ = self._kept.popleft()
        for index, layer in layers.items():
            assert same(layer, chunk(number).layer(index)), f"chunk {number} layer {index} changed while it was in use"
            if reader is not None:
                assert same(reader.layer(index), layer), f"chunk {number} layer {index} is another at second sight"

    def _look(self):
        kvs = [chunk(self.rng.randrange(self.numbers)) for _ in range(5)]
        keys = [kv.key for kv in kvs]
        calls = {
            "contains": lambda: self.store.contains(keys[0], kvs[0].token_ids),
            "in_memory": lambda: self.store.in_memory(keys[0]),
            "token_ids": lambda: self.store.token_ids(keys[0]),
            "prefetch": lambda: self.store.prefetch(keys, self.rng.randrange(9)),
            "cancel": lambda: self.store.cancel(keys),
            "version": lambda: self.store.index.version(),
            "entries": lambda: self.store.index.entries(keys),
            "stat": lambda: self.store.stat(),
        }
        name = self.rng.choice(list(calls))
        # The index alone raises when there is no daemon: who searches it takes that for no match.
        may_raise = contextlib.suppress(StoreError) if name in ("version", "entries") else contextlib.nullcontext()
        with self.timed(name), may_raise:
            calls[name]()


class Putter(Client):
    """Stores, and now and then removes."""

    def step(self):
        number = self.rng.randrange(0, self.numbers, 2)
        try:
            if self.rng.random() < 0.25:
                self.tell(f"removing {number}")
                with self.timed("remove"):
                    self.store.remove(chunk(number).key)
                self.tell(f"removed {number}")
            else:
                with self.timed("put"):
                    self.store.put(chunk(number))
                self.tell(f"put {number}")
            self.served()
        except StoreError:
            time.sleep(0.02)
        time.sleep(self.rng.uniform(0, 0.02))

    def finish(self):
        pass


class Ingest(Client):
    """Stores several in the background, then waits for them."""

    def step(self):
        batch = [self.rng.randrange(1, self.numbers, 2) for _ in range(6)]
        for number in batch:
            with self.timed("put_async"):
                self.store.put_async(chunk(number))
        try:
            with self.timed("flush"):
                self.store.flush()
        except StoreError:
            time.sleep(0.02)
            return
        for number in batch:
            self.tell(f"put {number}")
        self.served()
        time.sleep(self.rng.uniform(0, 0.05))

    def finish(self):
        pass


KINDS = {"engine": Engine, "putter": Putter, "ingest": Ingest}


def work(name, kind, root, seed, numbers, deadline):
    try:
        os.write(1, f"{name} pid {os.getpid()}\n".encode())
        KINDS[kind](name, root, int(seed), int(numbers), float(deadline)).run()
        os.write(1, f"{name} ended\n".encode())
        os._exit(0)
    except BaseException:
        os.write(1, f"{name} failed {traceback.format_exc()[-3000:]!r}\n".encode())
        os._exit(1)


def main():
    logging.disable()
    torch.set_num_threads(1)
    for number in range(150):
        chunk(number)  # known to every child
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(*line.split())


if __name__ == "__main__":
    main()
