from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from azure_process import AzureServer
from redis_process import PATIENCE, RedisServer
from remote_chunks import PATIENT, Opener
from s3_process import S3Server
from toxic import ToxicProxy

from blendkv.errors import TierUnavailableError
from blendkv.store.guard import GuardedTier, Limits
from blendkv.store.remote import open_remote


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One node that owns all slots, and like every node of a cluster refuses commands on keys of several slots."""
    server = RedisServer(tmp_path_factory.mktemp("cluster"), cluster_enabled="yes", cluster_announce_ip="127.0.0.1")
    try:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            end = time.monotonic() + PATIENCE
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                assert time.monotonic() < end
                time.sleep(0.05)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    server = AzureServer(tmp_path_factory.mktemp("azure"))
    yield server
    server.stop()


@pytest.fixture
def url_of(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """URL of a place of the given kind; its server is started if need be."""

    def find(kind: str) -> str:
        if kind in ("redis", "unix"):
            server = request.getfixturevalue("redis_server")
            return server.url if kind == "redis" else f"unix://{server.socket}"
        if kind == "cluster":
            return f"{request.getfixturevalue('redis_cluster').url}?cluster=1"
        if kind == "s3":
            server = request.getfixturevalue("s3_server")
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            return f"s3://{server.bucket}/some/prefix"
        if kind == "az":
            server = request.getfixturevalue("azure_server")
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            return f"az://{server.container}/some/prefix"
        return {"file": f"file://{tmp_path}/shared", "memory": f"memory://{tmp_path.name}"}[kind]

    return find


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open tiers in a namespace that only this test has; they are closed in the end."""
    tiers: list[GuardedTier] = []

    def open_tier(url: str, limits: Limits = PATIENT, namespace: str | None = None, secret: str = "") -> GuardedTier:
        environ = {"BLENDKV_ENCRYPTION_KEY": secret}
        own = namespace or f"{tmp_path.parent.name}.{tmp_path.name}"[-64:].lstrip(".-_")
        tiers.append(open_remote(url, namespace=own, limits=limits, environ=environ))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


@pytest.fixture
def proxy() -> Iterator[Callable[[int], ToxicProxy]]:
    """Put a bad network before a port of this machine."""
    proxies: list[ToxicProxy] = []

    def start(port: int) -> ToxicProxy:
        proxies.append(ToxicProxy(("127.0.0.1", port)))
        return proxies[-1]

    yield start
    for one in proxies:
        one.close()


@pytest.fixture
def until_answer() -> Callable[[Callable[[], object]], object]:
    """Repeat a call until the tier is there again."""

    def wait(call: Callable[[], object]) -> object:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return call()
            except TierUnavailableError:
                assert time.monotonic() < end, "it never came back"
                time.sleep(0.01)

    return wait
