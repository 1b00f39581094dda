"""Page-locked memory by a scripted CUDA runtime: what is registered, when it is let go, and what a failure does."""

from __future__ import annotations

import gc
import logging

import numpy as np
import pytest
import torch
from scripted_cuda import CudaError, ScriptedCudart

from blendkv.daemon.arena import PAGE, Arena, Window
from blendkv.daemon.pinning import Pinning, pin_for
from blendkv.store import KVStore

FLAGS = 0x01 | 0x08  # portable, read-only


def address_of(view):
    return np.frombuffer(view, np.uint8).ctypes.data


@pytest.fixture
def arena():
    return Arena(4 * PAGE)


def test_the_whole_arena_is_registered_and_served_from_there(arena):
    cudart, waited, window = ScriptedCudart(), [], Window(arena.reader_fd())
    private = address_of(window.view(0, PAGE))
    before = window.view(0, 5)
    pinning = Pinning(cudart, lambda: waited.append(len(cudart.calls)))
    assert not pinning.used
    pinning.take(window)
    pinning.wait()
    assert pinning.used
    ((name, (address, size, flags)),) = cudart.calls
    assert (name, size, flags) == ("register", 4 * PAGE, FLAGS)
    assert address != private, "to lock a private mapping copies its pages"
    assert address_of(window.view(PAGE, PAGE)) == address + PAGE
    arena.view(0, 5)[:] = b"later"  # by the daemon, when it was registered already
    assert bytes(window.view(0, 5)) == bytes(before) == b"later"
    assert torch.from_numpy(np.frombuffer(window.view(0, 5), np.uint8)).tolist() == list(b"later"), "without a warning"
    pinning.close()
    pinning.close()
    assert cudart.calls[1:] == [("unregister", (address,))]
    assert waited == [1], "copies under way are waited for before it is unregistered"
    assert bytes(window.view(0, 5)) == b"later"


def test_views_outlive_the_window(arena):
    window, pinning = Window(arena.reader_fd()), Pinning(ScriptedCudart(), lambda: None)
    pinning.take(window)
    pinning.wait()
    view = np.frombuffer(window.view(PAGE, 5), np.uint8)
    pinning.close()
    del window
    gc.collect()
    arena.view(PAGE, 5)[:] = b"still"
    assert view.tobytes() == b"still"


@pytest.mark.parametrize(
    ("answer", "why"), [(CudaError.not_supported, "returned 801"), (RuntimeError("no driver"), "no driver")]
)
def test_a_failure_is_counted_and_said_once(arena, answer, why, caplog):
    cudart, window = ScriptedCudart(answer, answer), Window(arena.reader_fd())
    private = address_of(window.view(0, PAGE))
    pinning = Pinning(cudart, lambda: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pinning.take(window)
            pinning.wait()
    assert (pinning.failures, pinning.used) == (2, False)
    assert [why in record.getMessage() for record in caplog.records] == [True]
    assert address_of(window.view(0, PAGE)) == private, "copies go on from ordinary memory"
    pinning.close()
    assert [name for name, _ in cudart.calls] == ["register", "register"], "nothing is there to unregister"


def test_what_cannot_be_unregistered_is_counted(arena):
    cudart = ScriptedCudart(CudaError.success, CudaError.invalid_value)
    pinning = Pinning(cudart, lambda: None)
    pinning.take(Window(arena.reader_fd()))
    pinning.close()
    assert pinning.failures == 1


def test_nothing_is_registered_after_the_end(arena):
    cudart = ScriptedCudart()
    pinning = Pinning(cudart, lambda: None)
    pinning.close()
    pinning.take(Window(arena.reader_fd()))
    pinning.wait()
    assert cudart.calls == []


def test_a_client_registers_the_arena_and_that_of_the_next_daemon(
    start_process, tmp_path, connect, make_kv, eventually
):
    kv = make_kv(1, tokens=40)
    first = start_process(tmp_path / "s", "1MB")
    client, cudart = connect(), ScriptedCudart()
    assert client.pin_failures == 0
    pinning = Pinning(cudart, lambda: None)
    client.pin_memory(pinning)
    client.pin_memory(Pinning(ScriptedCudart(), lambda: None))  # a second library of the same engine
    pinning.wait()
    assert pinning.used
    client.put(kv)
    reader = client.get(kv.key, kv.token_ids)
    address, size, _ = cudart.calls[0][1]
    assert address <= reader.layer(0)[0].data_ptr() < address + size
    first.kill()
    start_process(tmp_path / "s", "2MB")
    eventually(lambda: len(cudart.calls) == 3)
    pinning.wait()
    assert [name for name, _ in cudart.calls] == ["register", "unregister", "register"]
    assert cudart.calls[1][1] == (address,)
    assert cudart.calls[2][1][1] > size
    assert all(map(torch.equal, reader.layer(0), kv.layer(0))), "what the dead daemon lent can be read"
    again = client.get(kv.key, kv.token_ids)
    address, size, _ = cudart.calls[2][1]
    assert all(map(torch.equal, again.layer(1), kv.layer(1)))
    assert address <= again.layer(1)[0].data_ptr() < address + size
    client.close()
    assert cudart.calls[3:] == [("unregister", (address,))]


def test_it_is_for_cuda_and_a_daemon_only(start, connect, tmp_path, monkeypatch):
    start()
    client = connect()
    assert not pin_for(client, torch.device("cpu"))
    assert not pin_for(client, torch.device("cuda")) or torch.cuda.is_available()
    cudart = ScriptedCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with KVStore.open(None, memory_bytes=0) as embedded:
        assert not pin_for(embedded, torch.device("cuda"))
    assert not pin_for(client, torch.device("cpu"))
    assert cudart.calls == []
    assert pin_for(client, torch.device("cuda", 0))
    client.close()
    assert [name for name, _ in cudart.calls] == ["register", "unregister"]
