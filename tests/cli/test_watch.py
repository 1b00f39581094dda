"""`blendkv store stat`, once and tick by tick, with a daemon and without."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from daemon_process import MAIN, DaemonProcess, eventually

from blendkv.cli.watch import Sample, remote_rows, sample, tables, tier_rows
from blendkv.daemon.client import DaemonStore
from blendkv.store.base import TierStat
from blendkv.store.guard import RemoteStat
from blendkv.store.reports import StoreStat
from blendkv.store.segments import Traffic
from blendkv.store.timing import LATENCY_BUCKETS, Latency


def at(seconds: float, tier: TierStat, *remotes: RemoteStat) -> Sample:
    return Sample(seconds, StoreStat((tier,), 0, {}, 0, 0, 0, 0, 0, remotes), None, None)


def test_rates_are_per_second():
    then = at(10.0, TierStat("memory", 5, 1000, None, hits=4, misses=8))
    now = at(14.0, TierStat("memory", 4, 600, None, hits=24, misses=8))
    (row,) = tier_rows(now, then)
    assert [row[f"{what}_per_s"] for what in ("hits", "misses", "bytes")] == [5, 0, -100]
    (row,) = tier_rows(at(16.0, TierStat("memory", 0, 0, None, hits=8, misses=10)), now)
    assert (row["hits_per_s"], row["misses_per_s"]) == (4, 1), "a daemon that was started again counts anew"
    assert not [name for name in tier_rows(now)[0] if name.endswith("_per_s")], "one sample has no rate"


def remote(*, ok: int, miss: int, slow: int = 0, name: str = "redis", read: int = 0) -> RemoteStat:
    counts = [0] * (len(LATENCY_BUCKETS) + 1)
    counts[2], counts[-1] = ok + miss, slow
    calls = {("head", "ok"): ok, ("head", "miss"): miss, ("put", "error"): 7}
    return RemoteStat(name, "closed", 1, 2, calls, {"head": Latency(tuple(counts), 1.0)}, Traffic(stored_read=read))


def test_remote_tiers():
    tier = TierStat("memory", 0, 0, None)
    now = at(2.0, tier, remote(ok=30, miss=10, read=500), remote(ok=0, miss=0, slow=9), remote(ok=1, miss=0, name="s3"))
    first, second, third = remote_rows(now, at(0.0, tier, remote(ok=10, miss=10, read=100)))
    assert [row["name"] for row in (first, second, third)] == ["redis", "redis_2", "s3"]
    assert first["hit_rate"] == 0.75
    assert first["p50_s"] == {"head": LATENCY_BUCKETS[2]}
    assert first["calls_per_s"] == 10
    assert first["read_per_s"] == 200
    assert second["hit_rate"] is None
    assert second["p50_s"] == {"head": None}, "above all bounds"
    assert "calls_per_s" not in third, "it is new"
    json.dumps([first, second, third], allow_nan=False)


def watch(store: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAIN, "store", "stat", "--store", str(store), "--watch", "0.1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()


def test_a_daemon_tick_by_tick(tmp_path, make_kv):
    kv = make_kv(1)
    with DaemonProcess(tmp_path / "s", "1MB", "--remote", f"file://{tmp_path}/shared") as daemon:
        with DaemonStore(tmp_path / "s", 20.0) as store:
            process = watch(tmp_path / "s", "--json")
            first = json.loads(process.stdout.readline())
            assert [row["chunks"] for row in first["rows"]] == [0, 0]
            assert first["daemon"]["clients"] == 2
            store.put(kv)
            for _ in range(20):
                assert store.get(kv.key, kv.token_ids) is not None
            eventually(lambda: store.stat().uploaded == 1)
            ticks = [json.loads(process.stdout.readline())]
            while ticks[-1]["uploaded"] < 1 or ticks[-1]["rows"][0]["hits"] < 20:
                ticks.append(json.loads(process.stdout.readline()))
            assert [row["chunks"] for row in ticks[-1]["rows"]] == [1, 1]
            assert max(tick["rows"][0]["hits_per_s"] for tick in ticks) > 0
            assert ticks[-1]["remotes"][0]["state"] == "closed"
            assert {"operation": "put", "outcome": "ok", "count": 1} in ticks[-1]["remotes"][0]["calls"]
        daemon.kill()
        while ticks[-1]["daemon"] != {"up": False}:
            ticks.append(json.loads(process.stdout.readline()))
        assert [row["chunks"] for row in ticks[-1]["rows"]] == [1, 1], "the last that was heard"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        process.stdout.close()
        process.stderr.close()


def test_without_a_daemon_it_shows_what_is_on_disk(store):
    process = watch(store)
    lines = []
    while sum("disk" in line for line in lines) < 2:
        lines.append(process.stdout.readline())
    end(process)
    disk = next(line for line in lines if "disk" in line).split("│")
    assert int(disk[2]) > 0
    assert disk[9].strip() == "-", "no rate at the first tick"
    assert any("no daemon runs" in line for line in lines)
    second = [line for line in lines if "disk" in line][1].split("│")
    assert second[9].strip() == "0.0"


def test_once(cli, tmp_path, make_kv):
    with DaemonProcess(tmp_path / "s", "1MB", "--remote", f"file://{tmp_path}/shared"):
        with DaemonStore(tmp_path / "s", 20.0) as store:
            store.put(make_kv(1))
            eventually(lambda: store.stat().uploaded == 1)
            found = json.loads(cli("store", "stat", "--store", tmp_path / "s", "--json").out)
            assert found["rows"] == tier_rows(sample(store))
            assert found["remotes"][0]["name"] == "file"
            assert found["daemon"]["up"] is True
            assert found["models"] == [{"fingerprint": "model", "chunks": 1, "bytes": make_kv(1).nbytes}]
        shown = cli("store", "stat", "--store", tmp_path / "s").out
        assert "file" in shown
        assert "closed" in shown
        assert "of shared memory free" in shown


def test_too_short_a_time_is_refused(cli, store):
    wrong = cli("store", "stat", "--store", store, "--watch", "0")
    assert wrong.code == 2
    assert "0.1" in wrong.err


def test_tables_can_be_built_of_anything_there_is():
    tier = TierStat("memory", 1, 2, 3, 4, 5, {"limit": 6}, 7)
    group = tables(at(1.0, tier, remote(ok=1, miss=2)), at(0.0, tier, remote(ok=0, miss=0)))
    assert [table.row_count for table in group.renderables[:2]] == [1, 1]
