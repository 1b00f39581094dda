"""The daemon's page of metrics tells what happened, and what a client knows of its daemon."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from daemon_process import MAIN, DaemonProcess
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from redis_process import free_port

from blendkv.daemon.arena import PAGE
from blendkv.daemon.metrics import serving_metrics
from blendkv.errors import InputError
from blendkv.store import KVStore

TIMED = (("get", "memory"), ("put", "memory"), ("get", "disk"), ("put", "disk"))


def read(url: str) -> dict[tuple[str, ...], float]:
    """Every sample, by name and label values in order of the labels' names, without the store's."""
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    text = urllib.request.urlopen(request).read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            values = (value for name, value in sorted(sample.labels.items()) if name != "store")
            key = sample.name, *values
            assert key not in found
            found[key] = sample.value
            assert sample.labels.get("store", "s") == "s"
    return found


@pytest.fixture
def figures(start):
    """A daemon in this process, and its page."""
    pages = []

    def begin(*arguments, **options):
        daemon = start(*arguments, **options)
        serving = serving_metrics(daemon, "127.0.0.1", 0)
        port = serving.__enter__()
        pages.append(serving)
        return daemon, lambda: read(f"http://127.0.0.1:{port}/metrics")

    yield begin
    for serving in pages:
        serving.__exit__(None, None, None)


def test_they_add_up(figures, connect, make_kv):
    kvs = [make_kv(number) for number in range(4)]
    _, page = figures(3 * PAGE)
    client = connect()
    assert page()["blendkv_store_chunks", "disk"] == 0
    for kv in kvs:
        client.put(kv)
    held = client.get(kvs[3].key, kvs[3].token_ids)
    assert client.get(make_kv(9).key, make_kv(9).token_ids) is None
    found = page()
    assert found["blendkv_store_lookups_total", "hit", "memory"] == 1
    assert [found["blendkv_store_lookups_total", "miss", tier] for tier in ("memory", "disk")] == [1, 1]
    assert found["blendkv_store_evictions_total", "limit", "memory"] == 1
    taken = {labels: found["blendkv_store_call_seconds_count", *labels] for labels in TIMED}
    assert taken.pop(("get", "memory")) >= 2, "one that is not there may be asked for again by the thread that loads"
    assert list(taken.values()) == [4, 1, 4]
    assert found["blendkv_store_pending_chunks", "write"] == 0
    assert found["blendkv_store_chunks", "memory"] == 3
    assert found["blendkv_store_chunks", "disk"] == 4
    assert found["blendkv_store_bytes", "memory"] == found["blendkv_store_limit_bytes", "memory"] == 3 * PAGE
    assert found["blendkv_daemon_loans",] == found["blendkv_daemon_clients",] == 1
    assert found["blendkv_daemon_arena_bytes",] == 3 * PAGE
    assert found["blendkv_daemon_arena_free_bytes",] == found["blendkv_daemon_loads_waiting",] == 0
    assert found["blendkv_store_pending_bytes", "write"] == 0
    assert ("blendkv_store_pending_bytes", "upload") not in found
    assert found["process_resident_memory_bytes",] > 1 << 20
    del held
    client.pin([kvs[0].key])
    client.discard(kvs[1].key, "checksum: a test")
    client.discard(kvs[2].key, "something new: a test")
    found = page()
    assert found["blendkv_store_pinned_chunks",] == 1
    assert found["blendkv_store_discarded_total", "checksum"] == found["blendkv_store_discarded_total", "other"] == 1


def test_codecs_on_disk(figures, make_kv, tmp_path):
    kvs = [make_kv(number) for number in range(3)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
        size = store.stat().tiers[1].bytes
    daemon, page = figures()
    found = page()
    assert found["blendkv_store_codec_chunks", "raw"] == 3
    assert found["blendkv_store_codec_file_bytes", "raw"] == size
    assert found["blendkv_store_codec_kv_bytes", "raw"] == sum(kv.nbytes for kv in kvs)
    daemon.store.remove(kvs[0].key)
    assert page()["blendkv_store_codec_chunks", "raw"] == 3, "it is not counted at every look"
    daemon.store.index.usage._until = 0.0
    assert page()["blendkv_store_codec_chunks", "raw"] == 2


def test_remote_tiers(figures, connect, make_kv, tmp_path, eventually):
    """Two of one kind have two names; of one that is not there, the circuit opens."""
    dead = f"redis://127.0.0.1:{free_port()}"
    _, page = figures(remotes=[f"file://{tmp_path}/one", f"file://{tmp_path}/two?zstd=3", dead])
    client = connect()
    kvs = [make_kv(number, tokens=200) for number in range(4)]
    for kv in kvs:
        client.put(kv)
    eventually(lambda: client.stat().uploaded + client.stat().not_uploaded == 12)
    found = page()
    for tier in ("file", "file_2"):
        assert found["blendkv_remote_calls_total", "put", "ok", tier] == 4
        assert found["blendkv_remote_call_seconds_count", "put", tier] == 4
        assert found["blendkv_remote_circuit", "closed", tier] == 1
        assert found["blendkv_remote_bytes_total", "written", "raw", tier] > 0
        assert found["blendkv_remote_bytes_total", "read", "raw", tier] == 0
    assert found["blendkv_remote_call_seconds_bucket", "60.0", "put", "file"] == 4
    ratios = [
        found["blendkv_remote_bytes_total", "written", "stored", tier]
        / found["blendkv_remote_bytes_total", "written", "raw", tier]
        for tier in ("file", "file_2")
    ]
    assert ratios[0] > 1 > ratios[1]
    assert found["blendkv_store_uploads_total", "done"] == 8
    assert found["blendkv_store_uploads_total", "not_done"] == 4
    assert found["blendkv_remote_calls_total", "put", "error", "redis"] == 3
    assert found["blendkv_remote_calls_total", "put", "open", "redis"] == 1
    assert found["blendkv_remote_openings_total", "redis"] == 1
    states = {state: found["blendkv_remote_circuit", state, "redis"] for state in ("closed", "open", "half_open")}
    assert sum(states.values()) == 1
    assert not states["closed"]
    assert found["blendkv_store_pending_bytes", "upload"] == 0


def test_a_store_that_cannot_be_read_leaves_a_page_without_it(figures, caplog):
    daemon, page = figures()
    daemon.close()
    assert not [name for name, *_ in page() if name.startswith("blendkv_")]
    assert [name for name, *_ in page() if name.startswith("process_")]
    assert caplog.text.count("metrics have nothing of the store") == 1


def test_the_command_serves_them_without_torch(tmp_path):
    modules = tmp_path / "modules"
    before = (
        f"import atexit, pathlib, sys\natexit.register(lambda: pathlib.Path({str(modules)!r})"
        ".write_text('\\n'.join(sys.modules)))\n"
    )
    with DaemonProcess(tmp_path / "s", "1MB", "--metrics-port", "0", before=before) as daemon:
        url = daemon.ready["rows"][0]["metrics"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        assert read(url)["blendkv_daemon_arena_free_bytes",] == 999424 + PAGE
        assert daemon.kill(signal.SIGTERM) == 0
    loaded = modules.read_text().split()
    assert "prometheus_client" in loaded
    assert not {"torch", "transformers", "scipy"} & set(loaded)


def test_without_a_port_there_is_no_page(tmp_path):
    with DaemonProcess(tmp_path / "s", "1MB") as daemon:
        assert daemon.ready["rows"][0]["metrics"] is None


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path, start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(InputError, match=f"127.0.0.1:{port} .* give another --metrics-port"),
            serving_metrics(start(), "127.0.0.1", port),
        ):
            pass
        command = [sys.executable, "-c", MAIN, "daemon", "--store", str(tmp_path / "t"), "--metrics-port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1


def test_what_a_client_knows_of_its_daemon(connect, make_kv, tmp_path, eventually):
    kv = make_kv(1)
    with DaemonProcess(tmp_path / "s") as daemon:
        client = connect()
        client.put(kv)
        assert (client.up, client.reconnects, client.missed) == (True, 0, 0)
        daemon.kill()
    eventually(lambda: not client.up)
    assert client.get(kv.key, kv.token_ids) is None
    assert client.missed == 1
    assert client.stat().tiers[1].chunks == 0, "nobody had asked before"
    assert client.missed == 1, "who looks on misses nothing"
    with DaemonProcess(tmp_path / "s"):
        eventually(lambda: client.up)
        assert client.reconnects == 1
        assert client.stat().tiers[1].chunks == 1
