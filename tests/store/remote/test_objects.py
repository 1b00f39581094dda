"""What is the object stores' own: cut and altered objects, several parts, ranges, a full file system, wrong buckets."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from remote_chunks import Opener, StoredChunk, chunk, read_all

from blendkv.errors import DamagedChunkError, StoreFullError, TierUnavailableError
from blendkv.store.objects import LEAD_BYTES


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_the_layout_is_a_file_per_chunk(tmp_path: Path, opened: Opener) -> None:
    one = chunk(random.Random(0))
    one.put(opened(f"file://{tmp_path}/a%20b", namespace="tenant/model"))
    (path,) = files(tmp_path / "a b")
    assert str(path.relative_to(tmp_path)) == f"a b/blendkv-1/tenant/model/chunks=plain/{one.key[:2]}/{one.key}"
    assert path.read_bytes().endswith(b"".join(one.layers))


def test_a_head_larger_than_the_first_read(tmp_path: Path, opened: Opener, url_of: Callable[[str], str]) -> None:
    rng = random.Random(0)
    many = chunk(rng, layers=3000, size=10)  # the table alone is longer than the first read
    wide = StoredChunk("cd" * 32, rng.randbytes(3 * LEAD_BYTES), (b"layer",))
    for kind in ("file", "s3", "redis"):
        tier = opened(url_of(kind))
        for one in (many, wide):
            assert one.put(tier)
            assert read_all(tier, one.key, 1000) == one


def test_objects_cut_anywhere_or_altered_are_damage(tmp_path: Path, opened: Opener) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    tier, one = opened(f"file://{tmp_path}/s"), chunk(rng, size=200)
    one.put(tier)
    (path,) = files(tmp_path / "s")
    good = path.read_bytes()
    bad = [good[:size] for size in (0, 1, 15, 16, 40, 147, 148, 1000, len(good) - 1)] + [good + b"x"]
    for _ in range(60):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        bad.append(bytes(data))
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(DamagedChunkError):
            read_all(tier, one.key)
    path.write_bytes(good)
    assert read_all(tier, one.key) == one
    assert tier.stat().state == "closed"


def test_things_that_are_not_chunks_are_not_listed(tmp_path: Path, opened: Opener) -> None:
    tier, one = opened(f"file://{tmp_path}/s", namespace="n"), chunk(random.Random(0))
    one.put(tier)
    (path,) = files(tmp_path / "s")
    for name in ("note.txt", "A" * 64, f"{one.key}.tmp"):
        (path.parent / name).write_text("x")
    (path.parent.parent / "zz").mkdir()
    (path.parent.parent / "zz" / one.key).write_text("in the wrong folder")
    assert list(tier.keys()) == [one.key]


def test_only_what_is_asked_for_is_read(url_of: Callable[[str], str], opened: Opener) -> None:
    tier, one = opened(url_of("s3")), chunk(random.Random(0), layers=6, size=100_000)
    one.put(tier)
    head = tier.head(one.key)
    assert head is not None
    tier.fetch(head, 2, [memoryview(bytearray(100_000)) for _ in range(2)])
    traffic = tier.stat().traffic
    assert (traffic.raw_read, traffic.stored_read) == (201_000, 201_000)


def test_large_chunks_go_in_parts(url_of: Callable[[str], str], opened: Opener) -> None:
    tier, rng = opened(url_of("s3"), namespace="parts"), random.Random(0)
    small, large = chunk(rng, size=1000), chunk(rng, layers=5, size=5 << 20)
    store = S3Store("chunks", prefix="some/prefix", client_options={"allow_http": True})
    for one, parts in ((small, False), (large, True)):
        one.put(tier)
        found = obstore.head(store, f"blendkv-1/parts/chunks=plain/{one.key[:2]}/{one.key}")
        assert ("-" in str(found["e_tag"])) == parts  # S3's mark of a multipart upload
        assert read_all(tier, one.key, 5) == one


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_file_system_refuses_and_shows_nothing_of_it(small_disk: Path, opened: Opener) -> None:
    tier, rng = opened(f"file://{small_disk}/s"), random.Random(0)
    kept: list[StoredChunk] = []

    def fill() -> None:
        while True:
            one = chunk(rng, size=200_000)
            one.put(tier)
            kept.append(one)

    with pytest.raises(StoreFullError, match="no room"):
        fill()
    assert kept
    assert set(tier.keys()) == {one.key for one in kept}
    assert all(read_all(tier, one.key) == one for one in kept)
    assert tier.delete(kept[0].key)
    assert chunk(rng, size=1000).put(tier)
    assert tier.stat().calls["put", "full"] == 1
    assert tier.stat().state == "closed"


def test_a_folder_that_cannot_be_is_unavailable(tmp_path: Path, opened: Opener) -> None:
    (tmp_path / "file").write_text("x")
    tier = opened(f"file://{tmp_path}/file/s")
    with pytest.raises(TierUnavailableError):
        tier.head("0" * 64)


def test_a_bucket_that_is_not_there_takes_nothing(url_of: Callable[[str], str], opened: Opener) -> None:
    tier = opened(url_of("s3").replace("chunks", "nowhere"))
    with pytest.raises(TierUnavailableError, match="no such bucket"):
        chunk(random.Random(0)).put(tier)
