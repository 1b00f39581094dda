"""Daemons and engines that die or hang: nobody waits, nothing is lost, and all find together again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from blendkv.daemon.client import DaemonStore
from blendkv.errors import StoreError, UnavailableChunkError


def test_a_killed_daemon_is_a_miss_and_the_next_is_found(start_process, tmp_path, make_kv, assert_same, eventually):
    root, kvs = tmp_path / "s", [make_kv(number) for number in range(3)]
    process = start_process(root)
    with DaemonStore(root, 20.0) as client:
        for kv in kvs:
            client.put(kv)
        reader = client.get(kvs[0].key, kvs[0].token_ids)
        process.kill()
        eventually(lambda: not client.up)
        assert_same(reader, kvs[0])  # its memory outlives the daemon
        assert client.get(kvs[1].key, kvs[1].token_ids) is None
        assert not client.contains(kvs[1].key, kvs[1].token_ids)
        assert client.stat().tiers[1].chunks == 0  # never asked before: nothing is made up
        client.put_async(make_kv(9))
        with pytest.raises(StoreError, match="could not be stored in the background"):
            client.flush()
        with pytest.raises(StoreError):
            client.ls()
        assert client.missed >= 3
        start_process(root)
        eventually(lambda: client.up)
        for kv in kvs:
            assert_same(client.get(kv.key, kv.token_ids), kv)


def test_a_hung_daemon_counts_as_gone_and_comes_back(start_process, tmp_path, make_kv, assert_same, eventually):
    root, kv = tmp_path / "s", make_kv(1)
    process = start_process(root)
    with DaemonStore(root, 1.0) as client:
        client.put(kv)
        process.kill(signal.SIGSTOP)
        assert client.get(kv.key, kv.token_ids) is None  # after the deadline
        for _ in range(50):  # without it: who is known to be gone is not waited for
            assert client.get(kv.key, kv.token_ids) is None
        assert not client.up
        with pytest.raises(StoreError):
            client.put(kv)
        process.kill(signal.SIGCONT)
        eventually(lambda: client.up)
        assert_same(client.get(kv.key, kv.token_ids), kv)


def test_a_daemon_that_dies_while_it_loads_is_told_to_who_waits(start_process, tmp_path, make_kv, eventually):
    root = tmp_path / "s"
    kv = make_kv(1, tokens=4000, dims=((64, 64),) * 40, heads=4)  # 164 MB
    process = start_process(root, "400MB")
    with DaemonStore(root, 20.0) as client:
        client.put(kv)
    process.kill()
    process = start_process(root, "400MB")
    with DaemonStore(root, 20.0) as client:
        reader = client.get(kv.key, kv.token_ids)
        process.kill()
        try:
            for layer in range(kv.layers):
                for found, expected in zip(reader.layer(layer), kv.layer(layer), strict=True):
                    assert (found == expected).all()
        except UnavailableChunkError as error:  # it died before it was done; else all of it was right
            print(error)


def test_sigterm_ends_it_in_order_and_the_store_is_whole(start_process, tmp_path, make_kv):
    root = tmp_path / "s"
    process = start_process(root)
    with DaemonStore(root, 20.0) as client:
        for number in range(5):
            client.put(make_kv(number))
        assert process.kill(signal.SIGTERM) == 0
    assert not (root / "daemon.sock").exists()
    start_process(root)
    with DaemonStore(root, 20.0) as client:
        assert not client.repair
        assert client.verify().checked == 5


def borrow(root, number, held):
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("factory", Path(__file__).parents[1] / "factory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kv = module.make_kv(number)
    client = DaemonStore(root, 20.0)
    reader = client.get(kv.key, kv.token_ids)
    held.put(reader is not None)
    time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_engine_gives_back_what_it_was_lent(start, connect, make_kv, eventually, number):
    daemon, client, kv = start(), connect(), make_kv(1)
    client.put(kv)
    context = multiprocessing.get_context("spawn")
    held = context.Queue()
    process = context.Process(target=borrow, args=(daemon.root, 1, held))
    process.start()
    assert held.get(timeout=120)
    assert daemon.stats().loans == 1
    os.kill(process.pid, number)
    process.join()
    eventually(lambda: daemon.stats().loans == 0)
    eventually(lambda: daemon.stats().clients == 1)
    held.close()
    held.join_thread()
