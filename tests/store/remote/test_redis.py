"""What is Redis's own: expiry, eviction, limits, passwords, TLS, and a server that dies."""

from __future__ import annotations

import datetime
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_process import RedisServer, free_port
from remote_chunks import PATIENT, Opener, StoredChunk, chunk, read_all

import blendkv.store.redis
from blendkv.errors import DamagedChunkError, StoreError, StoreFullError, TierUnavailableError
from blendkv.store.guard import Limits
from blendkv.store.redis import VALUE_LIMIT
from blendkv.store.remote import open_remote


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    servers: list[RedisServer] = []

    def start(**settings: object) -> RedisServer:
        folder = tmp_path / f"server{len(servers)}"
        folder.mkdir()
        servers.append(RedisServer(folder, **settings))
        return servers[-1]

    yield start
    for one in servers:
        one.stop()


def names(server: RedisServer) -> list[str]:
    with server.client() as client:
        return sorted(name.decode() for name in client.keys("*"))


def test_one_hash_per_chunk_that_expires_when_it_is_not_used(
    server: Callable[..., RedisServer], opened: Opener
) -> None:
    place, one = server(), chunk(random.Random(0), layers=4)
    tier = opened(f"{place.url}?ttl=1000&db=0", namespace="tenant/model")
    one.put(tier)
    name = f"blendkv-1/tenant/model/chunks=plain:{{{one.key}}}"
    assert names(place) == [name]
    with place.client() as client:
        assert sorted(client.hkeys(name)) == [b"0", b"1", b"2", b"3", b"head", b"writing"]
        assert 900 < client.ttl(name) <= 1000
        client.expire(name, 50)
        assert one.put(tier) is False
        assert client.ttl(name) <= 50  # a look is no use
        tier.head(one.key)
        assert client.ttl(name) > 900
        client.pexpire(name, 1)
        time.sleep(0.05)
    assert tier.head(one.key) is None


def test_a_layer_that_is_gone_is_a_miss_and_the_rest_is_deleted(
    server: Callable[..., RedisServer], opened: Opener
) -> None:
    place, one = server(), chunk(random.Random(0))
    tier = opened(place.url)
    one.put(tier)
    head = tier.head(one.key)
    assert head is not None
    with place.client() as client:
        client.hdel(names(place)[0], "1")
    with pytest.raises(DamagedChunkError, match="missing: a layer is gone"):
        tier.fetch(head, 0, [memoryview(bytearray(5000)), memoryview(bytearray(5000))])
    assert names(place) == []
    assert tier.stat().calls["fetch", "missing"] == 1
    assert one.put(tier)
    assert read_all(tier, one.key) == one


def test_what_is_lost_while_it_is_written_is_never_seen(
    server: Callable[..., RedisServer], opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, one = server(), chunk(random.Random(0), layers=4, size=100_000)
    tier = opened(place.url)
    batches = blendkv.store.redis._batches

    def lose(fields: list[tuple[object, object]]) -> Iterator[object]:
        for number, batch in enumerate(batches(fields)):
            yield batch
            if number == 1:  # as an eviction or an expiry would
                with place.client() as client:
                    assert client.delete(*names(place)) == 1

    with monkeypatch.context() as patch:
        patch.setattr("blendkv.store.redis._BATCH", 150_000)
        patch.setattr("blendkv.store.redis._batches", lose)
        with pytest.raises(StoreFullError, match="while it was written"):
            one.put(tier)
    assert names(place) == []
    assert one.put(tier)
    assert read_all(tier, one.key) == one


def test_a_commit_whose_answer_was_lost_is_asked_again(server: Callable[..., RedisServer], opened: Opener) -> None:
    place, one = server(), chunk(random.Random(0))
    tier = opened(place.url)
    one.put(tier)
    name = names(place)[0]
    with place.client() as client:
        writing = client.hget(name, "writing")
        assert client.eval(blendkv.store.redis._COMMIT, 2, f"{name}:gone", name, 5, 60, writing) == 1
        assert client.eval(blendkv.store.redis._COMMIT, 2, f"{name}:gone", name, 5, 60, b"another") == -1
    assert read_all(tier, one.key) == one


@pytest.mark.parametrize("field", ["head", "0", "writing"])
def test_altered_values_are_damage(server: Callable[..., RedisServer], opened: Opener, field: str) -> None:
    place, one = server(), chunk(random.Random(0))
    tier = opened(place.url)
    one.put(tier)
    name = names(place)[0]
    rng = random.Random(1)
    with place.client() as client:
        value = client.hget(name, field)
        assert value is not None
        for _ in range(20):
            bad = bytearray(value)
            bad[rng.randrange(len(bad))] ^= rng.randrange(1, 256)
            client.hset(name, field, bytes(bad[: rng.choice([len(bad), rng.randrange(len(bad))])]))
            with pytest.raises(DamagedChunkError):
                read_all(tier, one.key)
    assert tier.stat().state == "closed"  # it answers; what it answers is another matter


def test_other_kinds_of_value_are_damage(server: Callable[..., RedisServer], opened: Opener) -> None:
    place, one = server(), chunk(random.Random(0))
    tier = opened(place.url)
    one.put(tier)
    with place.client() as client:
        client.set(names(place)[0], "text")
    with pytest.raises(DamagedChunkError, match="another kind"):
        tier.head(one.key)
    assert tier.delete(one.key)


def test_a_layer_larger_than_a_value_may_be_is_refused(server: Callable[..., RedisServer], opened: Opener) -> None:
    place = server()
    tier = opened(place.url)
    huge = memoryview(mmap.mmap(-1, VALUE_LIMIT + 1))  # never written, so it takes little memory
    with pytest.raises(StoreError, match="Redis takes 536870912 in one value"):
        tier.put("0" * 64, memoryview(b"head"), [huge])
    assert names(place) == []
    assert tier.stat().calls == {("put", "refused"): 1}


@pytest.mark.parametrize("batch", [32 << 20, 500_000])  # in one transaction, and in one per layer
def test_a_full_server_refuses_and_keeps_nothing_of_it(
    server: Callable[..., RedisServer], opened: Opener, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendkv.store.redis._BATCH", batch)
    place, rng = server(maxmemory="8mb", maxmemory_policy="noeviction"), random.Random(0)
    tier = opened(place.url)
    kept: list[StoredChunk] = []

    def fill() -> None:
        while True:
            one = chunk(rng, layers=3, size=600_000)
            one.put(tier)
            kept.append(one)

    with pytest.raises(StoreFullError, match="maxmemory"):
        fill()
    assert kept
    assert len(names(place)) == len(kept)
    assert all(read_all(tier, one.key) == one for one in kept)
    assert tier.stat().state == "closed"
    assert tier.delete(kept[0].key)
    assert chunk(rng, size=1000).put(tier)


def test_a_full_server_that_evicts_loses_chunks_as_a_whole(server: Callable[..., RedisServer], opened: Opener) -> None:
    place, rng = server(maxmemory="8mb", maxmemory_policy="allkeys-lru"), random.Random(0)
    tier = opened(place.url)
    chunks = [chunk(rng, layers=6, size=200_000) for _ in range(20)]
    for one in chunks:
        one.put(tier)
    found = [read_all(tier, one.key) for one in chunks]
    assert None in found
    assert found[-1] == chunks[-1]
    assert all(there is None or there == one for there, one in zip(found, chunks, strict=True))
    # One that cannot fit is evicted while it is written: seen by nobody.
    with pytest.raises((StoreFullError, TierUnavailableError)):
        chunk(rng, layers=12, size=2_000_000, key="ee" * 32).put(tier)
    assert tier.head("ee" * 32) is None


def test_passwords_come_from_the_environment(server: Callable[..., RedisServer]) -> None:
    place, one = server(requirepass="hunter2"), chunk(random.Random(0))
    good = open_remote(place.url, limits=PATIENT, environ={"BLENDKV_REDIS_PASSWORD": "hunter2"})
    assert one.put(good)
    for environ in ({}, {"BLENDKV_REDIS_PASSWORD": "hunter3"}, {"BLENDKV_REDIS_USERNAME": "x"}):
        bad = open_remote(place.url, limits=PATIENT, environ=environ)
        with pytest.raises(TierUnavailableError) as caught:
            bad.head(one.key)
        assert "hunter" not in str(caught.value)
        bad.close()
    good.close()


def certificate(folder: Path) -> dict[str, object]:
    """A certificate of 127.0.0.1's own, in files for redis-server."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {"tls_cert_file": folder / "cert.pem", "tls_key_file": folder / "key.pem", "tls_auth_clients": "no"}


def test_tls_trusts_whom_the_machine_trusts(
    server: Callable[..., RedisServer], opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, one = free_port(), chunk(random.Random(0))
    server(tls_port=port, **certificate(tmp_path))
    url = f"rediss://127.0.0.1:{port}"
    with pytest.raises(TierUnavailableError, match=r"(?i)certificate"):
        opened(url).head(one.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
    tier = opened(url)
    assert one.put(tier)
    assert read_all(tier, one.key) == one


def test_a_killed_server_is_left_alone_and_found_again(
    server: Callable[..., RedisServer], opened: Opener, until_answer: Callable[..., object],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    place, rng = server(appendonly="yes", appendfsync="always"), random.Random(0)
    tier = opened(place.url, Limits(deadline_s=5, failures=2, first_back_off_s=0.02, longest_back_off_s=0.1))
    before = chunk(rng)
    assert before.put(tier)
    head = tier.head(before.key)
    assert head is not None
    place.kill()
    for _ in range(2):
        with pytest.raises(TierUnavailableError):
            tier.fetch(head, 0, [memoryview(bytearray(5000))])
    assert tier.stat().openings == 1
    for _ in range(20):
        with pytest.raises(TierUnavailableError, match="left alone"):
            tier.head(before.key)
        time.sleep(0.01)
    place.start()
    until_answer(lambda: tier.fetch(head, 0, [memoryview(bytearray(5000))]))
    assert read_all(tier, before.key) == before
    assert chunk(rng).put(tier)
    assert tier.stat().state == "closed"
    assert [record.levelname for record in caplog.records if "left alone" in record.message] == ["WARNING"]


def test_killed_between_any_two_commands_a_chunk_is_whole_or_not_there(
    server: Callable[..., RedisServer], opened: Opener
) -> None:
    # Killed within a rewrite of its log, Redis 7.0 may not start again ("the truncated file is not the last file").
    place, rng = server(appendonly="yes", auto_aof_rewrite_percentage=0), random.Random(0)
    whole = 0
    for _ in range(6):
        tier = opened(place.url, Limits(deadline_s=60, failures=1000))
        chunks = [chunk(rng, layers=8, size=100_000) for _ in range(60)]

        def write(todo: list[StoredChunk] = chunks, tier: object = tier) -> None:
            for one in todo:
                try:
                    one.put(tier)  # type: ignore[arg-type]
                except TierUnavailableError:
                    return

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(rng.uniform(0.02, 0.15))
        place.kill()
        writer.join()
        place.start()
        for one in chunks:
            found = read_all(tier, one.key)
            assert found is None or found == one
            whole += found is not None
        with place.client() as client:  # what the writer left behind goes by itself
            left = {name: client.ttl(name) for name in client.keys("*")}
        assert -1 not in left.values(), left  # -1: it never expires; -2: it has gone since it was listed
    assert whole
