"""Quotas against a model that is a list: who has to go, who is refused, and that nobody else is touched."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.server import Daemon
from blendkv.errors import StoreFullError
from blendkv.market.classic import LruPolicy
from blendkv.store import KVStore
from blendkv.store import disk as disk_module
from blendkv.store.memory import MemoryTier
from blendkv.store.quotas import Quotas
from blendkv.store.tensors import encode_chunk

A, B, C = "a" * 32, "b" * 32, "c" * 32
TENANTS = ("", A, B)
CHUNKS = st.tuples(st.sampled_from(TENANTS), st.integers(0, 3))


class Model:
    """Chunks in the order of their use; ``sizes`` in bytes by chunk (tenant, number)."""

    def __init__(self, sizes, limit, quotas):
        self.sizes, self.limit, self.quotas = sizes, limit, quotas
        self.order: list[tuple[str, int]] = []
        self.pinned: set[tuple[str, int]] = set()
        self.evicted = {"quota": 0, "limit": 0}
        self.refused = 0

    def bytes(self, tenant=None, among=None):
        among = self.order if among is None else among
        return sum(self.sizes[chunk] for chunk in among if tenant in (None, chunk[0]))

    def use(self, chunk):
        if chunk in self.order:
            self.order.append(self.order.pop(self.order.index(chunk)))
        return chunk in self.order

    def put(self, chunk):
        """Whether there is room."""
        if self.use(chunk):
            return True
        tenant, size, quota = chunk[0], self.sizes[chunk], self.quotas.of(chunk[0])
        if quota is not None and size > quota - self.bytes(tenant, self.pinned):
            self.refused += 1
            return False
        if self.limit is not None and size > self.limit - self.bytes(None, self.pinned):
            return False
        if quota is not None:
            self.shrink(tenant, quota - size, "quota")
        if self.limit is not None:
            self.shrink(None, self.limit - size, "limit")
        self.order.append(chunk)
        return True

    def shrink(self, tenant, limit, reason):
        while self.bytes(tenant) > limit:
            victim = next(c for c in self.order if tenant in (None, c[0]) and c not in self.pinned)
            self.order.remove(victim)
            self.evicted[reason] += 1

    def forget(self, chunk):
        there = chunk in self.order
        if there:
            self.order.remove(chunk)
        self.pinned.discard(chunk)
        return there


class QuotaMachine(RuleBasedStateMachine):
    """A store whose memory holds nothing, so that the disk's order of use is known exactly."""

    kvs: dict
    limit_chunks: int | None
    quota_chunks: dict[str, int]

    def __init__(self):
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        sizes = {chunk: len(encode_chunk(kv)) for chunk, kv in self.kvs.items()}
        largest = max(sizes.values())
        limit = None if self.limit_chunks is None else self.limit_chunks * largest
        quotas = Quotas({tag: count * largest for tag, count in self.quota_chunks.items()}, 3 * largest)
        self.model = Model(sizes, limit, quotas)
        self.open()

    def open(self):
        self.store = KVStore.open(
            self.path / "s", memory_bytes=0, disk_bytes=self.model.limit, policy="lru", quotas=self.model.quotas
        )
        self.begin = dict(self.model.evicted), self.model.refused

    def close(self):
        self.store.close()

    def index(self):
        return self.store._disk.index

    @rule(chunk=CHUNKS)
    def put(self, chunk):
        others = {other for other in self.model.order if other[0] != chunk[0]}
        limited = self.model.quotas.of(chunk[0]) is not None
        fits = self.model.put(chunk)
        try:
            self.store.put(self.kvs[chunk])
            assert fits
        except StoreFullError:
            assert not fits
        self.index().flush_touches()
        if limited and self.model.limit is None:
            assert others <= self.there()

    @rule(chunk=CHUNKS)
    def get(self, chunk):
        kv = self.kvs[chunk]
        assert (self.store.get(kv.key, kv.token_ids) is not None) == self.model.use(chunk)
        self.index().flush_touches()  # uses are written in batches, and count as later than what came meanwhile

    @rule(chunk=CHUNKS, pinned=st.booleans())
    def pin(self, chunk, pinned):
        if chunk in self.model.order:
            (self.store.pin if pinned else self.store.unpin)([self.kvs[chunk].key])
            (self.model.pinned.add if pinned else self.model.pinned.discard)(chunk)

    @rule(chunk=CHUNKS)
    def remove(self, chunk):
        assert self.store.remove(self.kvs[chunk].key) == self.model.forget(chunk)

    @rule()
    def mend(self):
        assert not self.store.gc().repair

    @rule()
    def reopen(self):
        self.close()
        self.open()

    def there(self):
        return {chunk for chunk, kv in self.kvs.items() if self.store.contains(kv.key, kv.token_ids)}

    @invariant()
    def it_holds_what_the_model_holds(self):
        assert self.there() == set(self.model.order)

    @invariant()
    def sums_are_right_and_within_quotas(self):
        stat = self.store.stat()
        found = {use.tag: (use.chunks, use.disk_bytes) for use in stat.tenants if use.chunks}
        assert found == {
            tag: (sum(c[0] == tag for c in self.model.order), self.model.bytes(tag))
            for tag in TENANTS
            if any(c[0] == tag for c in self.model.order)
        }
        assert all(use.quota is None or use.disk_bytes <= use.quota for use in stat.tenants)
        disk = stat.tiers[-1]
        for reason, count in self.model.evicted.items():
            assert disk.evictions.get(reason, 0) == count - self.begin[0][reason]
        assert disk.refused.get("quota", 0) == self.model.refused - self.begin[1]

    def teardown(self):
        self.close()
        shutil.rmtree(self.path)


class DaemonQuotaMachine(QuotaMachine):
    """The same in a daemon, whose memory has room for all: there quotas hold for what is in memory as well."""

    def open(self):
        self.daemon = Daemon(self.path / "s", 1 << 20, self.model.limit, "lru", quotas=self.model.quotas)
        self.thread = threading.Thread(target=self.daemon.serve)
        self.thread.start()
        self.store = DaemonStore(self.path / "s", 60.0)
        self.begin = dict(self.model.evicted), self.model.refused

    def close(self):
        self.store.close()
        self.daemon.close()
        self.thread.join()

    def index(self):
        return self.daemon.store.index

    @invariant()
    def memory_is_within_quotas(self):
        for use in self.store.stat().tenants:
            assert use.quota is None or use.memory_bytes <= use.quota


def run(machine, examples, **attributes):
    run_state_machine_as_test(
        type("LimitedMachine", (machine,), attributes),
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.fixture(scope="module")
def kvs(make_kv):
    return {(tag, number): make_kv(number, tokens=6, tenant=tag) for tag in TENANTS for number in range(4)}


@pytest.mark.parametrize("limit", [None, 4, 7])
@pytest.mark.parametrize("quota_chunks", [{A: 2}, {A: 1, B: 0}, {A: 3, B: 2}])
def test_quotas_hold_as_in_a_model(kvs, limit, quota_chunks):
    run(QuotaMachine, 12, kvs=kvs, limit_chunks=limit, quota_chunks=quota_chunks)


class MemoryMachine(RuleBasedStateMachine):
    """The memory tier alone; a chunk in use is kept as a pinned one is."""

    kvs: dict
    limit_chunks: int
    quota_chunks: dict[str, int]

    def __init__(self):
        super().__init__()
        sizes = {chunk: kv.nbytes for chunk, kv in self.kvs.items()}
        size = next(iter(sizes.values()))
        quotas = Quotas({tag: count * size for tag, count in self.quota_chunks.items()})
        self.model = Model(sizes, self.limit_chunks * size, quotas)
        self.tier = MemoryTier(self.model.limit, LruPolicy(self.model.limit), quotas=quotas)
        self.used: list[tuple[str, int]] = []

    @rule(chunk=CHUNKS, how=st.sampled_from(["put", "hold"]))
    def add(self, chunk, how):
        fits = self.model.put(chunk)
        try:
            getattr(self.tier, how)(self.kvs[chunk])
            assert fits
        except StoreFullError:
            assert not fits
            return
        if how == "hold":
            self.used.append(chunk)
            self.model.pinned.add(chunk)

    @rule(chunk=CHUNKS)
    def get(self, chunk):
        assert (self.tier.get(self.kvs[chunk].key) is not None) == self.model.use(chunk)

    @rule(place=st.integers(0, 9))
    def release(self, place):
        if self.used:
            chunk = self.used.pop(place % len(self.used))
            self.tier.release(self.kvs[chunk].key)
            if chunk not in self.used:
                self.model.pinned.discard(chunk)

    @rule(tenant=st.sampled_from(TENANTS), chunks=st.integers(0, 4))
    def keep_quota(self, tenant, chunks):
        size = chunks * next(iter(self.model.sizes.values()))
        quota = self.model.quotas.of(tenant)
        refused = quota is not None and size > quota - self.model.bytes(tenant, self.model.pinned)
        try:
            self.tier.keep_quota(tenant, size)
            assert not refused
        except StoreFullError:
            assert refused
            self.model.refused += 1
            return
        if quota is not None:
            self.model.shrink(tenant, quota - size, "quota")

    @invariant()
    def it_holds_what_the_model_holds(self):
        assert {chunk for chunk, kv in self.kvs.items() if self.tier.contains(kv.key)} == set(self.model.order)
        assert self.tier.tenants() == {tag: n for tag in TENANTS if (n := self.model.bytes(tag))}
        stat = self.tier.stat()
        assert {"quota": 0, "limit": 0, **stat.evictions} == self.model.evicted
        assert stat.refused.get("quota", 0) == self.model.refused


@pytest.mark.parametrize(("limit", "quota_chunks"), [(9, {A: 2, B: 1}), (4, {A: 3}), (2, {A: 3, B: 0})])
def test_so_they_do_in_memory(kvs, limit, quota_chunks):
    run(MemoryMachine, 25, kvs=kvs, limit_chunks=limit, quota_chunks=quota_chunks)


@pytest.mark.parametrize("quota_chunks", [{A: 2}, {A: 1, B: 0}])
def test_so_they_do_in_a_daemon(kvs, quota_chunks):
    run(DaemonQuotaMachine, 6, kvs=kvs, limit_chunks=None, quota_chunks=quota_chunks)


def test_a_refusal_names_tenant_quota_and_bytes(tmp_path, make_kv):
    kv = make_kv(1, tenant=A)
    size = len(encode_chunk(kv))
    with KVStore.open(tmp_path / "s", memory_bytes=0, quotas=Quotas({A: size - 1}, names={A: "acme"})) as store:
        with pytest.raises(StoreFullError, match=rf"{size} bytes does not fit in the quota of tenant acme: {size - 1}"):
            store.put(kv)
        assert store.stat().tiers[-1].refused == {"quota": 1}
        store.put(make_kv(1, tenant=B))


def test_a_quota_that_was_lowered_is_kept_by_the_next_put_and_by_gc(tmp_path, make_kv):
    kvs = [make_kv(number, tenant=A) for number in range(5)]
    size = max(len(encode_chunk(kv)) for kv in kvs)
    other = make_kv(9, tenant=B)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(other)
        for kv in kvs[:4]:
            store.put(kv)
    limits = {"memory_bytes": 0, "policy": "lru"}
    with KVStore.open(tmp_path / "s", **limits, disk_bytes=6 * size, quotas=Quotas({A: 2 * size})) as store:
        store.put(kvs[4])
        assert [store.contains(kv.key, kv.token_ids) for kv in (*kvs, other)] == [False] * 3 + [True] * 3
    with KVStore.open(tmp_path / "s", **limits, quotas=Quotas({A: size})) as store:
        assert store.gc().evicted == 1
        assert [store.contains(kv.key, kv.token_ids) for kv in (*kvs, other)] == [False] * 4 + [True] * 2


def test_on_a_full_device_a_tenant_over_its_quota_gives_first(tmp_path, make_kv, monkeypatch):
    kvs, other = [make_kv(number, tenant=A) for number in range(4)], make_kv(9, tenant=B)
    size = max(len(encode_chunk(kv)) for kv in kvs)
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in (other, *kvs[:3]):
            store.put(kv)
    full, write = [True], disk_module.write_all

    def no_space(fd, data):
        if full.pop() if full else False:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(fd, data)

    monkeypatch.setattr(disk_module, "write_all", no_space)
    with KVStore.open(tmp_path / "s", memory_bytes=0, quotas=Quotas({A: 2 * size})) as store:
        store.put(kvs[3])
        assert [store.contains(kv.key, kv.token_ids) for kv in (*kvs, other)] == [False, False, True, True, True]
        assert store.stat().tiers[-1].evictions == {"quota": 2}
