"""The market as the policy of the memory tier: who uses a chunk decides how long it stays."""

from __future__ import annotations

import pytest

from blendkv.market.base import Use
from blendkv.market.context import current_use, using
from blendkv.store import KVStore


@pytest.mark.parametrize(("policy", "stays"), [("lru", False), ("market", True)])
def test_a_flood_of_single_shots(make_kv, policy, stays):
    """A loop's chunks, used by its every turn, and then single shots: recency forgets the loop, the market does not."""
    kvs = [make_kv(number) for number in range(12)]
    with KVStore.open(None, memory_bytes=4 * kvs[0].nbytes, policy=policy) as store:
        loop, flood = kvs[:2], kvs[2:]
        with using(Use("agent", "loop")):
            for kv in loop:
                store.put(kv)
        for number, kv in enumerate(flood):
            with using(Use("single", f"shot-{number}")):
                store.put(kv)
        assert [store.in_memory(kv.key) for kv in loop] == [stays, stays]
        assert store.stat().tiers[0].bytes <= 4 * kvs[0].nbytes


def test_the_use_is_of_the_block_it_stands_in():
    assert current_use() == Use()
    with using(Use("chat", "a")):
        with using(Use("rag")):
            assert current_use() == Use("rag")
        assert current_use() == Use("chat", "a")
    assert current_use() == Use()
