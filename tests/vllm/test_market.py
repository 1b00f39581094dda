"""Whose work a request is, from its parameters to the store's prices; tenants; a daemon's prefetch and memory."""

from __future__ import annotations

import base64
import random
from collections import Counter
from functools import partial

import pytest
import torch
from blending import blending as start
from blending import close
from daemon_process import STUCK_DISK, DaemonProcess, eventually
from scripted_cuda import ScriptedCudart
from tiny import seed_of_run

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.opening import open_store
from blendkv.daemon.pinning import Pinning
from blendkv.engines.vllm.prefetch import Prefetcher, priority_of
from blendkv.market.base import NOBODY, Use
from blendkv.market.context import current_use
from blendkv.store import KVStore
from blendkv.tenants import tenant_tag
from blendkv.types import ChunkKV, Recipe, as_token_ids

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
SIZES, BLOCK = (33, 70, 45), 32
DEADLINE = 3.0
"""Of the connector's client here: a loaded machine must not look like a dead daemon."""


@pytest.fixture(scope="module")
def synchronised():
    """Loans of the daemon whenever the worker waited for its copies, as it does where memory is page-locked."""
    loans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blendkv.engines.vllm.stores.open_store", partial(open_store, deadline=DEADLINE))
        patch.setattr("blendkv.engines.vllm.worker.pin_for", partial(pin_as_on_cuda, patch, loans))
        yield loans


def pin_as_on_cuda(patch, loans, store, device):
    """What `pin_for` does where there is a GPU, with a scripted CUDA runtime."""
    if not isinstance(store, DaemonStore):
        return False
    store.pin_memory(Pinning(ScriptedCudart(), lambda: None))
    patch.setattr(torch.cuda, "synchronize", lambda device: loans.append(store.daemon_stats().loans))
    return True


@pytest.fixture(scope="module", params=["daemon", "in process"])
def running(request, synchronised, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    if request.param == "in process":
        with start(folder, sizes=SIZES, extra={"policy": "market"}, block_size=BLOCK) as running:
            yield running
        return
    daemon = DaemonProcess(folder / "store", "64MB", "--policy", "market")
    with start(folder, sizes=SIZES, block_size=BLOCK) as running:
        assert isinstance(running.store, DaemonStore)
        yield running
    daemon.close()


def priced(running):
    """Class and kind of the prompt's chunks, once nobody reads them: what is in use has no price."""
    keys = {running.library.key(chunk.token_ids) for chunk in running.world.chunks}
    running.store.flush()

    def listed():
        return {price.key: price for price in running.store.market(1000).prices if price.key in keys}

    eventually(lambda: listed().keys() == keys)
    return {(price.workload, price.kind) for price in listed().values()}


def test_class_and_session_of_a_request_reach_the_stores_prices(running):
    running.ask(mode="reuse", salt="1", workload="agent", session="loop:1")
    assert priced(running) == {("agent", "private")}
    running.ask(mode="reuse", salt="2", workload="agent", session="loop:1")
    assert priced(running) == {("agent", "private")}
    running.ask(mode="reuse", salt="3", workload="chat", session="talk")
    assert priced(running) <= {("chat", "new"), ("chat", "shared")}, "two sessions use them"
    running.ask(mode="reuse", salt="4", workload="my-class")
    assert running.told["outcome"] == "blended", "any word is a class"


def test_two_tenants_of_one_engine_share_nothing(running, monkeypatch):
    monkeypatch.setenv("BLENDKV_TENANT_SALT", base64.b64encode(bytes(range(32))).decode())
    tags = {name: tenant_tag(name) for name in ("acme", "bolt", "corp")}
    chunks, computed, answers = len(running.world.chunks), Counter(), {}
    for number, name in enumerate(("acme", "bolt", "acme", "bolt")):
        before = running.worker.outcomes["computed"]
        answers[number] = running.ask(mode="reuse", salt=f"{tags[name]}|{number}", tenant=tags[name])
        assert running.told["outcome"] == "blended"
        computed[name, number > 1] += running.worker.outcomes["computed"] - before
        running.store.flush()
    first = {("acme", False): chunks, ("bolt", False): chunks}
    assert {name: count for name, count in computed.items() if count} == first, "each tenant's chunks are its own"
    assert all(close(answers[0], answer) for answer in answers.values())
    stats = running.store.stat().tenants
    found = {name: running.store.index.count(tag) for name, tag in tags.items()}
    assert found == {"acme": chunks + 1, "bolt": chunks + 1, "corp": 0}, "chunks and the system prefix"
    assert len(stats) >= 2
    running.ask(mode="reuse", salt=f"{tags['acme']}|content", tenant=tags["acme"], segments=None)
    assert running.told["reusable_tokens"] > 0
    running.ask(mode="reuse", salt=f"{tags['corp']}|content", tenant=tags["corp"], segments=None)
    assert running.told["reusable_tokens"] == 0, "nor is another tenant's chunk found by content"


def test_tenants_share_nothing_in_the_prefix_cache(running):
    a, b = "ab" * 16, "cd" * 16

    def cached(salt):
        running.ask(mode="full", salt=salt, named=False)
        return running.last[0].num_cached_tokens

    assert [cached(a), cached(b), cached(a) > 0, cached(b) > 0] == [0, 0, True, True]
    refused = running.scheduler.outcomes["cache_salt"]
    running.ask(mode="reuse", salt=f"{a}|x", tenant=b)
    assert running.told["reason"] == "cache_salt", "another tenant's salt"
    assert running.scheduler.outcomes["cache_salt"] == refused + 1


def test_copies_from_page_locked_memory_are_over_before_chunks_are_given_back(running, synchronised):
    synchronised.clear()
    running.ask(mode="reuse", salt="pinned")
    pinned = isinstance(running.store, DaemonStore)
    assert len(synchronised) == pinned
    assert not pinned or synchronised[0] > len(running.world.chunks), "the prefix and the chunks are still lent"


def make(number, size=9):
    ids = as_token_ids(range(10 * number + 1, 10 * number + 1 + size))
    pair = (torch.randn(size, 2, 8), torch.randn(size, 2, 8))
    return ChunkKV("model", Recipe("bos", (1,), "float32"), ids, *((part, part) for part in pair))


def test_a_daemon_is_told_of_all_that_a_request_waits_for_and_forgets_what_an_aborted_one_did(tmp_path, monkeypatch):
    kvs = [make(number) for number in range(8)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
    chunks, keys = [(kv.key, kv.token_ids) for kv in kvs], [kv.key for kv in kvs]
    daemon = DaemonProcess(tmp_path / "s", before=STUCK_DISK.format(layer=0))
    told = []
    with DaemonStore(tmp_path / "s", DEADLINE) as client:
        real = client.prefetch

        def noted(wanted, priority):
            told.append((list(wanted), priority, current_use()))
            return real(wanted, priority)

        monkeypatch.setattr(client, "prefetch", noted)
        ahead = Prefetcher(client, 60.0)
        assert not ahead.ready("low", chunks[:6], Use("single"))
        eventually(lambda: client.daemon_stats().loading == 6)
        assert not ahead.ready("high", chunks[5:], Use("agent", "s"))
        eventually(lambda: client.daemon_stats().loading == 8)
        agent, single = priority_of(Use("agent")), priority_of(Use("single"))
        assert told == [(keys[:6], single, Use("single")), (keys[6:], agent, Use("agent", "s"))]
        assert not ahead.ready("low", chunks[:6], Use("single")), "asked again it only looks"
        assert len(told) == 2
        ahead.drop("low")  # four have begun
        eventually(lambda: client.daemon_stats().loading < 8)
        assert [client.in_memory(key) for key in keys[6:]] == [True] * 2, "what another request waits for goes on"
        daemon.kill()
        ahead.close()


def test_who_may_wait_least_is_loaded_first():
    order = [priority_of(Use(workload)) for workload in ("agent", "mine", "rag", "single")]
    assert order == sorted(order, reverse=True)
    assert len(set(order)) == 4
    assert min(order) > 0
    assert priority_of(NOBODY) == order[1]


def test_an_engine_without_a_daemon_reads_for_whoever_asks(tmp_path, monkeypatch):
    rng = random.Random(seed := seed_of_run())
    print(f"seed {seed}")
    kvs = [make(number) for number in range(3)]
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        seen, real = [], store.get
        monkeypatch.setattr(store, "get", lambda key, ids: seen.append((key, current_use())) or real(key, ids))
        monkeypatch.setattr(store, "in_memory", lambda key: False)
        for kv in kvs:
            store.put(kv)
        ahead = Prefetcher(store, 10.0)
        uses = [Use(rng.choice(["agent", "chat"]), f"s{number}") for number in range(3)]
        for number, (kv, use) in enumerate(zip(kvs, uses, strict=True)):
            eventually(lambda kv=kv, use=use, n=number: ahead.ready(f"r{n}", [(kv.key, kv.token_ids)], use))
        assert seen == [(kv.key, use) for kv, use in zip(kvs, uses, strict=True)]
        ahead.close()
