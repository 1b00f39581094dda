"""Several processes on one store, and writers that are killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from blendkv.store import KVStore
from blendkv.store.tensors import encode_chunk

TOKENS, DIMS = 200, ((64, 64), (32, 64))


class Worker:
    """The process that forks the children; see writer_process.py."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("writer_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, path, mode, seed):
        self.process.stdin.write(f"{path} {mode} {seed}\n")
        self.process.stdin.flush()

    def read(self):
        line = self.process.stdout.readline().split(maxsplit=1)
        assert line, "the worker died"
        assert line[0] != "failed", line
        return line[0], line[1].strip() if len(line) > 1 else ""

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def workers():
    with contextlib.ExitStack() as stack:
        workers = [Worker(), Worker()]
        for worker in workers:
            stack.callback(worker.close)
        yield workers


def run_and_kill(worker, path, mode, seed, rng):
    """Start a writer, kill it at a random moment, and return the numbers whose put had returned."""
    worker.start(path, mode, seed)
    pid, committed, puts = 0, [], rng.randint(0, 4)
    killed = False
    while True:
        word, value = worker.read()
        if word == "pid":
            pid = int(value)
        elif word == "put":
            committed.append(int(value))
        elif word == "ended":
            return committed
        if pid and not killed and len(committed) >= puts:
            time.sleep(rng.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            killed = True


def check(path, store):
    """No file but whole chunks that have a row."""
    files = {file.stem for file in (path / "kv").rglob("*") if file.is_file()}
    assert files == {info.key for info in store.ls() if "disk" in info.tiers}
    report = store.verify()
    assert not report.damaged
    assert report.checked == len(files)


def test_kill_9_at_random_moments_loses_and_breaks_nothing(tmp_path, workers, make_kv, assert_holds):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "s"
    committed = []
    for round_ in range(18):
        committed += run_and_kill(workers[0], path, "put", round_, rng)
        if path.exists():  # else it was killed before it did anything
            with KVStore.open(path, memory_bytes=0) as store:
                check(path, store)
                for number in committed:
                    assert_holds(store, make_kv(number, tokens=TOKENS, dims=DIMS))
    print(len(committed), "chunks committed")
    assert len(committed) >= 9


def test_kill_9_while_evicting(tmp_path, workers):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "s"
    for round_ in range(8):
        run_and_kill(workers[0], path, "limited", round_, rng)
        if path.exists():
            with KVStore.open(path, memory_bytes=0) as store:
                check(path, store)
                assert len(store.ls()) <= 7  # the limit, and one that was adopted


def test_processes_share_a_store(tmp_path, workers, make_kv, assert_holds):
    seed = random.randrange(2**16)
    print("seed", seed)
    path = tmp_path / "s"
    kvs = [make_kv(number, tokens=TOKENS, dims=DIMS) for number in range(12)]
    limit = 6 * len(encode_chunk(kvs[0])) + 100
    with KVStore.open(path, memory_bytes=0, disk_bytes=limit) as store:
        for number, worker in enumerate(workers):
            worker.start(path, "mix", seed + number)
        rng = random.Random(seed)
        for _ in range(40):
            kv = rng.choice(kvs)
            store.put(kv)
            reader = store.get(kv.key, kv.token_ids)
            if reader is not None:  # else another process evicted it meanwhile
                reader.layer(0)
            # A sweep takes nothing from a writer that lives, except the name of a file that is not locked yet: that
            # one begins again.
            assert not replace(store.gc().repair, temporary=0)
        for worker in workers:
            lines = [worker.read() for _ in range(3)]
            assert [word for word, _ in lines] == ["pid", "done", "ended"]
            assert lines[1] == ("done", "0")  # nobody ever saw damage
        assert store.stat().discarded == {}
        assert store.stat().tiers[1].bytes <= limit
        check(path, store)


def test_threads_share_a_store(tmp_path, make_kv, assert_same):
    seed = random.randrange(2**32)
    print("seed", seed)
    kvs = [make_kv(number) for number in range(10)]
    failures = []
    with KVStore.open(
        tmp_path / "s", memory_bytes=4 * kvs[0].nbytes, disk_bytes=7 * len(encode_chunk(kvs[0])) + 100
    ) as store:

        def work(number):
            rng = random.Random(seed + number)
            try:
                for _ in range(60):
                    kv = rng.choice(kvs)
                    action = rng.random()
                    if action < 0.3:
                        store.put(kv)
                    elif action < 0.5:
                        store.put_async(kv)
                    elif action < 0.6:
                        store.remove(kv.key)
                    elif action < 0.65:
                        store.flush()
                    elif action < 0.7:
                        store.gc()
                    elif (reader := store.get(kv.key, kv.token_ids)) is not None:
                        assert_same(reader, kv)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []
        store.flush()
        stat = store.stat()
        assert (stat.background_errors, stat.discarded, stat.collision) == (0, {}, 0)
        memory, disk = stat.tiers
        assert memory.bytes == memory.chunks * kvs[0].nbytes <= memory.limit
        assert disk.bytes <= disk.limit
        check(tmp_path / "s", store)


def test_one_reader_serves_several_threads(tmp_path, make_kv, assert_same, disk_reads):
    kv = make_kv(1, dims=((8, 8),) * 12)
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        store.put(kv)
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        reader, failures = store.get(kv.key, kv.token_ids), []

        def work():
            try:
                assert_same(reader, kv)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []
        assert len(disk_reads) == 12
        assert store.stat().promoted == 1
