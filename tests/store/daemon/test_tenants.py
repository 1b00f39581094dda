"""Tenants over a daemon: a miss tells nothing of others, quotas hold in shared memory."""

from __future__ import annotations

from blendkv.daemon.arena import PAGE
from blendkv.daemon.connection import Connection
from blendkv.store.quotas import Quotas

A, B = "a" * 32, "b" * 32


def test_a_miss_for_what_another_tenant_has_is_as_any_miss(make_kv, start, connect, monkeypatch):
    """The same messages there, and replies of the same type and size."""
    start()
    store = connect()
    store.put(make_kv(1, tenant=A))
    said: list[tuple[str, ...]] = []
    replied = Connection._await

    def noted(self, number, call, request, *arguments):
        reply, fds = replied(self, number, call, request, *arguments)
        said.append((type(request).__name__, repr(reply)))
        return reply, fds

    monkeypatch.setattr(Connection, "_await", noted)
    runs = []
    for kv in (make_kv(1, tenant=B), make_kv(1), make_kv(2, tenant=A), make_kv(9)):
        said.clear()
        assert store.get(kv.key, kv.token_ids) is None
        assert not store.contains(kv.key, kv.token_ids)
        assert store.token_ids(kv.key) is None
        runs.append(list(said))
    assert len(runs[0]) == 3
    assert all(run == runs[0] for run in runs)


def test_stat_names_tenants(make_kv, start, connect):
    start(quotas=Quotas({A: 10_000, "c" * 32: 5}, 77_777, {A: "acme"}))
    client = connect()
    client.put(make_kv(1, tenant=A))
    assert [(use.name, use.chunks, use.quota) for use in client.stat().tenants] == [("acme", 1, 10_000), (None, 0, 5)]


def test_a_tenant_makes_room_among_its_own_in_shared_memory(make_kv, start, connect):
    """A chunk of these takes a page; the arena has room for four, and A may have two."""
    daemon = start(4 * PAGE, quotas=Quotas({A: 2 * PAGE}))
    client = connect()
    others = [make_kv(0, tenant=B), make_kv(0)]
    for kv in (*others, *(make_kv(number, tenant=A) for number in range(5))):
        client.put(kv)
        assert daemon.store._memory.tenants().get(A, 0) <= 2 * PAGE
    assert all(client.in_memory(kv.key) for kv in others)
    assert [client.in_memory(make_kv(number, tenant=A).key) for number in range(5)] == [False, False, False, True, True]
    memory = client.stat().tiers[0]
    assert dict(memory.evictions) == {"quota": 3}


def test_what_is_lent_counts_and_who_holds_its_quota_gets_no_more(make_kv, start, connect, assert_same):
    daemon = start(4 * PAGE, quotas=Quotas({A: PAGE}))
    client = connect()
    first, second = make_kv(1, tenant=A), make_kv(2, tenant=A)
    for kv in (make_kv(0), second, first):
        client.put(kv)
    held = client.get(first.key, first.token_ids)
    reader = client.get(second.key, second.token_ids)  # from its file: there is no room that may be taken for it
    assert_same(reader, second)
    assert client.in_memory(make_kv(0).key)
    assert daemon.store._memory.tenants()[A] == PAGE
    assert client.stat().tiers[0].refused["quota"] == 1
    assert_same(held, first)
