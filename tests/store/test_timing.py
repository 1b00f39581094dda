"""How long calls took: histograms, and which calls of a store and of codecs they are of."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendkv.store import CODECS, KVStore
from blendkv.store.timing import CODEC_TIMINGS, LOCAL_BUCKETS, Timings
from blendkv.store.writer import BackgroundWriter

SECONDS = st.floats(0, 100) | st.sampled_from(LOCAL_BUCKETS)


def counted(timings, name):
    """Calls under a name."""
    found = timings.read().get(name)
    return 0 if found is None else sum(found.counts)


@given(st.lists(st.tuples(st.sampled_from("ab"), SECONDS)))
def test_every_call_is_in_its_bucket(calls):
    timings = Timings()
    for name, seconds in calls:
        timings.add(name, seconds)
    found = timings.read()
    assert found.keys() == {name for name, _ in calls}
    for name, latency in found.items():
        taken = [seconds for other, seconds in calls if other == name]
        assert latency.seconds == pytest.approx(sum(taken))
        assert [bound for bound, _ in latency.cumulative] == [*LOCAL_BUCKETS, math.inf]
        for bound, count in latency.cumulative:
            assert count == sum(seconds <= bound for seconds in taken)


def test_threads_lose_no_call():
    timings = Timings()

    def work():
        for _ in range(5000):
            timings.add("a", 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted(timings, "a") == 20_000
    assert timings.read()["a"].seconds == 10_000


def test_what_fails_is_not_timed():
    timings = Timings()
    with timings.timed("a"):
        pass
    with pytest.raises(KeyError), timings.timed("a"):
        raise KeyError
    assert counted(timings, "a") == 1


def calls(store):
    """Counts by tier and operation."""
    return {
        (tier.name, operation): sum(latency.counts)
        for tier in store.stat().tiers
        for operation, latency in tier.latencies.items()
    }


def test_a_store_times_the_calls_of_its_tiers(make_kv, tmp_path):
    one, two = make_kv(1), make_kv(2)
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        assert calls(store) == {}
        store.put(one)
        store.get(one.key, one.token_ids)
        assert store.get(two.key, two.token_ids) is None
        assert calls(store) == {
            ("memory", "put"): 1, ("disk", "put"): 1, ("memory", "get"): 2, ("disk", "get"): 1,
        }  # fmt: skip
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 20) as store:
        reader = store.get(one.key, one.token_ids)
        for index in (0, 1, 0):  # what is kept is not read again
            reader.layer(index)
        assert calls(store) == {("memory", "get"): 1, ("disk", "get"): 1, ("disk", "load"): 2}


def test_the_codecs_of_this_process_are_timed():
    layer = torch.ones(3, 2, 16), torch.ones(3, 2, 16)
    before = {name: counted(CODEC_TIMINGS, name) for name in ("int8 encode", "int8 decode", "raw encode")}
    parts = CODECS.get("int8").encode(*layer)
    CODECS.get("int8").decode(parts, "float32")
    CODECS.get("int8").decode(parts, "float32")
    CODECS.get("raw").encode(*layer)
    after = {name: counted(CODEC_TIMINGS, name) - count for name, count in before.items()}
    assert after == {"int8 encode": 1, "int8 decode": 2, "raw encode": 0}


def test_the_writer_knows_how_many_wait(make_kv):
    entered, leave = threading.Event(), threading.Event()

    def write(kv):
        entered.set()
        assert leave.wait(60)

    writer = BackgroundWriter(write, 1 << 20)
    assert writer.pending_chunks == 0
    for number in range(3):
        writer.submit(make_kv(number))
    assert entered.wait(60)
    assert writer.pending_chunks == 3
    leave.set()
    assert writer.drain() == []
    assert writer.pending_chunks == 0
    writer.close()
