"""A process that works on a store until it is killed or done. Started by the tests; one import serves many children.

Reads one line per job from its input, ``<store> <mode> <seed>``, forks a child for it, and answers ``pid <n>``, the
child's own lines, and ``ended``. Modes: ``put`` writes chunk after chunk and tells ``put <number>`` once each is
stored; ``limited`` does so with a disk limit of six chunks; ``mix`` puts, reads, removes and evicts,
then tells ``done``.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import traceback

from factory import make_kv

from blendkv.store import KVStore
from blendkv.store.tensors import encode_chunk

TOKENS, DIMS = 200, ((64, 64), (32, 64))


def chunk(number):
    return make_kv(number, tokens=TOKENS, dims=DIMS)


def tell(line):
    os.write(1, f"{line}\n".encode())


def put(path, mode, seed):
    limit = 6 * len(encode_chunk(chunk(0))) + 100 if mode == "limited" else None
    store = KVStore.open(path, memory_bytes=0, disk_bytes=limit)
    for number in range(seed * 1000, seed * 1000 + 1000):
        store.put(chunk(number))
        tell(f"put {number}")


def mix(path, seed):
    rng = random.Random(seed)
    kvs = [chunk(number) for number in range(12)]
    with KVStore.open(path, memory_bytes=0, disk_bytes=6 * len(encode_chunk(kvs[0])) + 100) as store:
        for _ in range(80):
            kv = rng.choice(kvs)
            action = rng.random()
            if action < 0.5:
                store.put(kv)
            elif action < 0.6:
                store.remove(kv.key)
            elif (reader := store.get(kv.key, kv.token_ids)) is not None:
                for index in range(kv.layers):
                    assert all((a == b).all() for a, b in zip(reader.layer(index), kv.layer(index), strict=True))
        discarded = store.stat().discarded
    tell(f"done {sum(discarded.values())}")


def main():
    logging.disable()
    for line in sys.stdin:
        path, mode, seed = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                mix(path, int(seed)) if mode == "mix" else put(path, mode, int(seed))
                os._exit(0)
            except Exception:
                tell("failed " + traceback.format_exc().replace("\n", " | "))
                os._exit(1)
        tell(f"pid {pid}")
        os.waitpid(pid, 0)
        tell("ended")


if __name__ == "__main__":
    main()
