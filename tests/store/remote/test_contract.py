"""What every remote tier does alike, over real servers: plain, compressed and encrypted."""

from __future__ import annotations

import base64
import random
import threading
from collections.abc import Callable

import pytest
from remote_chunks import Opener, StoredChunk, chunk, read_all

from blendkv.errors import DamagedChunkError, InputError, StoreError
from blendkv.store.guard import GuardedTier

KINDS = ("memory", "file", "redis", "unix", "cluster", "s3", "az")
PACKINGS = {"plain": {}, "zstd": {"zstd": "5"}, "sealed": {"encrypt": "1"}, "both": {"zstd": "1", "encrypt": "1"}}
SECRET, OTHER = (base64.b64encode(bytes([value]) * 32).decode() for value in (1, 2))


def with_options(url: str, options: dict[str, str]) -> str:
    for name, value in options.items():
        url += f"{'&' if '?' in url else '?'}{name}={value}"
    return url


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, url_of: Callable[[str], str]) -> str:
    return url_of(request.param)


@pytest.fixture(params=PACKINGS)
def packed(request: pytest.FixtureRequest, place: str) -> str:
    return with_options(place, PACKINGS[request.param])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


def test_a_chunk_comes_back_byte_for_byte(packed: str, opened: Opener, rng: random.Random) -> None:
    tier, other = opened(packed, secret=SECRET), opened(packed, secret=SECRET)
    one = chunk(rng, layers=5)
    assert read_all(tier, one.key) is None
    assert one.put(tier)
    for client in (tier, other):  # two machines with one place
        head = client.head(one.key)
        assert head is not None
        assert (head.layers, head.file_bytes) == ((5000,) * 5, 26000)
        for step in (1, 2, 5):
            assert read_all(client, one.key, step) == one
        assert client.contains([one.key, "0" * 64]) == {one.key}
        assert set(client.keys()) == {one.key}
    assert other.delete(one.key)
    assert not tier.delete(one.key)
    assert read_all(tier, one.key) is None
    assert tier.contains([one.key]) == set()
    assert list(tier.keys()) == []


def test_what_is_there_is_left_as_it_is(place: str, opened: Opener, rng: random.Random) -> None:
    tier = opened(place)
    first = chunk(rng)
    assert first.put(tier)
    assert not chunk(rng, key=first.key).put(tier)
    assert read_all(tier, first.key) == first


def test_many_keys_are_looked_up_and_listed(place: str, opened: Opener, rng: random.Random) -> None:
    tier = opened(place)
    chunks = [chunk(rng, layers=1, size=10) for _ in range(40)]
    assert all(one.put(tier) for one in chunks)
    here, gone = [one.key for one in chunks], [f"{rng.getrandbits(256):064x}" for _ in range(30)]
    assert tier.contains([*gone, *here]) == set(here)
    assert tier.contains([]) == set()
    assert set(tier.keys()) == set(here)


def test_a_large_chunk_of_uneven_layers(place: str, opened: Opener, rng: random.Random) -> None:
    tier = opened(place)
    sizes = (9 << 20, 1, 6_000_001, 0, 3 << 20)
    large = StoredChunk(chunk(rng).key, rng.randbytes(100_000), tuple(rng.randbytes(size) for size in sizes))
    assert large.put(tier)
    assert read_all(tier, large.key, 2) == large
    assert read_all(tier, large.key, 5) == large


def test_namespaces_do_not_see_each_other(packed: str, opened: Opener, rng: random.Random) -> None:
    mine, base = chunk(rng), f"t{rng.getrandbits(64)}"
    names = (base, f"{base}/model", f"{base}/{mine.key[:2]}", f"{base}/{mine.key}", f"{base}-2")
    tiers = [opened(packed, namespace=name, secret=SECRET) for name in names]
    for tier in tiers:
        assert mine.put(tier)
        assert set(tier.keys()) == {mine.key}
        assert tier.delete(mine.key)
        assert [list(other.keys()) for other in tiers] == [[]] * len(tiers)
    assert mine.put(tiers[1])
    assert [other.contains([mine.key]) for other in tiers] == [set(), {mine.key}, set(), set(), set()]
    assert not any(other.delete(mine.key) for other in tiers if other is not tiers[1])


def test_another_encryption_key_is_another_place(place: str, opened: Opener, rng: random.Random) -> None:
    mine, others, plain = (opened(place, secret=secret) for secret in (SECRET, OTHER, ""))
    one = chunk(rng)
    assert one.put(mine)
    for stranger in (others, plain):
        assert stranger.head(one.key) is None
        assert list(stranger.keys()) == []
        assert not stranger.delete(one.key)
    assert read_all(mine, one.key) == one


def test_several_writers_of_one_key_leave_one_whole_chunk(packed: str, opened: Opener, rng: random.Random) -> None:
    tiers = [opened(packed, secret=SECRET) for _ in range(4)]
    versions = [chunk(rng, layers=4, key="ab" * 32) for _ in tiers]
    start, stop, seen, reasons = threading.Barrier(len(tiers) + 1), threading.Event(), [], []

    def write(tier: GuardedTier, one: StoredChunk) -> None:
        start.wait()
        one.put(tier)

    def watch() -> None:
        start.wait()
        while not stop.is_set():
            try:
                seen.append(read_all(tiers[0], "ab" * 32, 2))
            except DamagedChunkError as error:
                reasons.append(error.reason)

    threads = [threading.Thread(target=write, args=pair) for pair in zip(tiers, versions, strict=True)]
    watcher = threading.Thread(target=watch)
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert read_all(tiers[1], "ab" * 32) in versions
    assert all(one is None or one in versions for one in seen)
    assert all(reason.startswith("missing") for reason in reasons), reasons  # replaced meanwhile: said, not mixed


def test_a_chunk_that_goes_while_it_is_read_is_a_miss(place: str, opened: Opener, rng: random.Random) -> None:
    tier, other = opened(place), opened(place)
    one, two = chunk(rng), chunk(rng)
    for gone, next_version in ((one, None), (two, chunk(rng, key=two.key))):
        assert gone.put(tier)
        head = tier.head(gone.key)
        assert head is not None
        assert other.delete(gone.key)
        if next_version is not None:
            assert next_version.put(other)
        into = memoryview(bytearray(5000))
        with pytest.raises(DamagedChunkError, match="missing"):
            tier.fetch(head, 1, [into])
        assert bytes(into) == bytes(5000)
        assert read_all(tier, gone.key) == next_version
    assert tier.stat().calls["fetch", "missing"] == 2


def test_wrong_requests_say_so(place: str, opened: Opener, rng: random.Random) -> None:
    tier, one = opened(place), chunk(rng)
    for key in ("", "x", "A" * 64, "0" * 63 + "*", "../" + "0" * 61, "0" * 64 + "\n"):
        for call in (tier.head, tier.delete, lambda key: tier.contains([key])):
            with pytest.raises(InputError, match="64 hex digits"):
                call(key)
    one.put(tier)
    head = tier.head(one.key)
    assert head is not None
    for first, sizes in ((0, [4999]), (3, [5000]), (-1, [5000]), (2, [5000, 5000]), (0, [])):
        with pytest.raises(InputError, match="memory for them"):
            tier.fetch(head, first, [memoryview(bytearray(size)) for size in sizes])
    with pytest.raises(StoreError, match="layers"):
        tier.put("1" * 64, memoryview(b"head"), [])
    assert tier.stat().calls["head", "refused"] == 6
    tier.close()
    tier.close()
    with pytest.raises(StoreError, match="closed"):
        tier.head(one.key)


def test_bytes_are_counted(place: str, opened: Opener, rng: random.Random) -> None:
    plain, small = opened(place), opened(with_options(place, {"zstd": "3"}), namespace=f"z{rng.getrandbits(64)}")
    one = chunk(rng, layers=4, size=100_000)
    for tier in (plain, small):
        one.put(tier)
        read_all(tier, one.key)
        traffic = tier.stat().traffic
        assert (traffic.raw_written, traffic.raw_read) == (401_000, 401_000)
    assert 0.99 < (plain.stat().traffic.ratio or 0) < 1
    assert 1.9 < (small.stat().traffic.ratio or 0) < 2.1  # half of it is noise
    assert small.stat().traffic.stored_read < 220_000
