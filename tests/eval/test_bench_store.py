"""`bench store`: its rows, and the figures that a store which gives back something else does not get."""

from __future__ import annotations

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from blendkv.cli.main import app
from blendkv.daemon.reader import LentReader
from blendkv.errors import InputError
from blendkv.eval.bench import store_index, store_model, store_read
from blendkv.eval.bench.rows import Rows
from blendkv.eval.bench.store import AIMS, Aim, StoreSettings, run_store
from blendkv.eval.bench.store_get import GetSettings, make_chunks
from blendkv.eval.bench.store_index import IndexSettings
from blendkv.eval.bench.store_model import ModelSettings, measure_put, measure_ttft
from blendkv.store.disk import DiskTier
from blendkv.store.index import Index

SHAPE = "smollm2-135m"
FIELDS = {"name", "value", "unit", "baseline", "ratio"}


def by_name(rows):
    assert all(set(row) == FIELDS for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row for row in rows}


def test_the_command():
    result = CliRunner().invoke(app, ["bench", "store", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["command"], told["problems"], told["missed"]) == ("bench store", [], [])
    rows = by_name(told["rows"])
    for name in (
        f"memcpy, {SHAPE}", f"daemon_get, {SHAPE}", f"daemon_get_single, {SHAPE}", f"daemon_put, {SHAPE}",
        f"daemon_get_first_touch, {SHAPE}",
        f"daemon_get_overhead_us, {SHAPE}", f"embedded_get_memory, {SHAPE}", f"embedded_get_disk_warm, {SHAPE}",
        f"embedded_put, {SHAPE}", "lookup_64_of_20k", "lookup_64_of_20k_p99", "daemon_rss_mb",
        "daemon_rss_after_start_mb", "daemon_rss_after_lookups_mb", "daemon_rss_after_puts_mb", "daemon_peak_mb",
        "daemon_start", "daemon_put_evicting", f"int8 decode, {SHAPE}",
    ):  # fmt: skip
        assert rows[name]["value"] > 0, name
    get, copy = rows[f"daemon_get, {SHAPE}"], rows[f"memcpy, {SHAPE}"]
    assert get["baseline"] == copy["name"]
    assert get["ratio"] == pytest.approx(get["value"] / copy["value"])
    held = [rows[f"daemon_rss_after_{when}_mb"]["value"] for when in ("start", "lookups", "puts")]
    assert rows["daemon_rss_mb"]["value"] == max(held)
    for state in ("cold", "warm"):
        for way in ("preadv", "checked", "mmap", "direct"):
            assert rows[f"disk_read_{way}_{state}, {SHAPE}"]["value"] > 0
        assert rows[f"disk_read_preadv_{state}, {SHAPE}"]["ratio"] == 1


def test_a_store_that_gives_back_something_else_gets_no_figure(monkeypatch, tmp_path):
    right = LentReader.layer
    monkeypatch.setattr(LentReader, "layer", lambda self, index: tuple(t + 1 for t in right(self, index)))
    result = run_store(StoreSettings.quick(["get"]))
    rows = by_name(result.rows)
    refused = {name for name, row in rows.items() if row["value"] is None}
    names = ("get", "get_single", "get_private", "get_first_touch", "get_overhead_us", "put")
    assert refused == {f"daemon_{name}, {SHAPE}" for name in names}
    assert all(rows[name]["ratio"] is None for name in refused)
    assert {line.split(": ")[0] for line in result.problems} == refused
    ended = CliRunner().invoke(app, ["bench", "store", "--quick", "--parts", "get"])
    assert ended.exit_code == 1
    assert "refused: daemon_get" in ended.output


def test_look_ups_that_are_wrong_get_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(store_index, "token_ids_digest", lambda ids: "other")
    rows = Rows()
    store_index.measure_index(IndexSettings(rows=500, tokens=4, rounds=2, puts=2), tmp_path, rows, lambda line: None)
    found = by_name(rows.rows)
    assert found["lookup_64_of_0k"]["value"] is found["daemon_rss_mb"]["value"] is None
    assert found["daemon_start"]["value"] > 0


def test_the_index_is_as_a_store_would_have_it(tmp_path):
    """Rows and files belong together: the daemon that opens it drops none, and evicts the oldest first."""
    settings = IndexSettings(rows=300, tokens=4, rounds=1, puts=1)
    store_index.fill(tmp_path / "s", settings)
    index = Index(tmp_path / "s" / "index.sqlite")
    assert index.totals() == (300, 300 * 4096)
    tier = DiskTier(tmp_path / "s", index, 290 * 4096, None, bytes)
    assert tier.shrink() == (10, 10 * 4096)
    assert [row.key for row in index.rows()] == [store_index._key(number) for number in range(10, 300)]
    index.close()


def test_reads_that_are_not_cold_or_not_right_get_no_figure(monkeypatch, tmp_path):
    settings = GetSettings(((SHAPE, 1),), tokens=64, nbytes=1 << 15, rounds=1)
    monkeypatch.setattr(store_read, "drop_cached", store_read.cached_bytes)
    right = store_read._WAYS["mmap"]
    monkeypatch.setitem(store_read._WAYS, "mmap", lambda file, memory: right(file, memory[::1]) or _spoil(memory))
    rows = Rows()
    store_read.measure_read(settings, tmp_path, rows, lambda line: None)
    found = by_name(rows.rows)
    for way in ("preadv", "checked", "mmap"):
        assert found[f"disk_read_{way}_cold, {SHAPE}"]["value"] is None
    assert found[f"disk_read_mmap_warm, {SHAPE}"]["value"] is None
    assert found[f"disk_read_checked_warm, {SHAPE}"]["value"] > 0
    assert any("the page cache held" in line for line in rows.problems)
    assert any("differs from what was put" in line for line in rows.problems)


def _spoil(memory):
    memory[-5000] ^= 1


def test_cached_bytes(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10_000)
    assert store_read.cached_bytes(path) == 3 * 4096
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert store_read.drop_cached(path) == store_read.cached_bytes(path) == 0


@pytest.fixture(scope="module")
def model_rows(llama, tmp_path_factory):
    rows, settings = Rows(), ModelSettings(2, 40, 1, ("blend:strided@0.2",))
    for measure in (measure_ttft, measure_put):
        measure(llama, settings, tmp_path_factory.mktemp("bench"), rows, lambda line: None)
    return rows


def test_model_rows(model_rows):
    found = by_name(model_rows.rows)
    assert model_rows.problems == []
    ratio = found["ttft_disk_over_memory, strided@0.2"]
    disk, memory = found["ttft_disk, strided@0.2"]["value"], found["ttft_memory, strided@0.2"]["value"]
    assert ratio["value"] == ratio["ratio"] == pytest.approx(disk / memory)
    cost = found["put_cost"]
    assert cost["value"] == pytest.approx(100 * (1 - cost["ratio"]))
    assert found["collect"]["value"] > 0
    assert found["collect_and_put"]["value"] > 0


def test_first_tokens_that_differ_get_no_figure(llama, monkeypatch, tmp_path):
    right = store_model._Side.first_token
    calls = []

    def off(self, blend):
        calls.append(1)
        seconds, logits = right(self, blend)
        return seconds, logits + len(calls)

    monkeypatch.setattr(store_model._Side, "first_token", off)
    rows = Rows()
    measure_ttft(llama, ModelSettings(2, 40, 1, ("blend:strided@0.2",)), tmp_path, rows, lambda line: None)
    assert [row["value"] for row in rows.rows] == [None] * 3
    assert "logits from disk differ" in rows.problems[0]


def test_aims():
    row = {"name": "daemon_get, x", "value": 10.0, "unit": "GB/s", "baseline": "memcpy, x", "ratio": 0.7}
    assert Aim("daemon_get", "ratio", least=0.8).missed(row) == "daemon_get, x: ratio 0.7, at least 0.8 is asked"
    assert Aim("daemon_get", "ratio", least=0.7).missed(row) is None
    assert Aim("daemon_get", "value", most=9.0).missed(row) == "daemon_get, x: value 10, at most 9 is asked"
    assert Aim("daemon_put", "value", most=9.0).missed(row) is None
    assert Aim("daemon_get", "ratio", least=0.8).missed({**row, "ratio": None}) is None
    assert all((aim.least is None) != (aim.most is None) for aim in AIMS)


def test_chunks_are_random_and_many():
    chunks = make_chunks((SHAPE, 2), GetSettings(tokens=8, nbytes=1))
    assert len({kv.key for kv in chunks}) == len(chunks) == 2
    assert not torch.equal(chunks[0].k[0], chunks[1].k[0])
    assert not torch.equal(chunks[0].k[0], chunks[0].v[0])


def test_wrong_settings():
    with pytest.raises(InputError, match="unknown part 'tape'; allowed: get, index, read, codecs, ttft, put"):
        StoreSettings(parts=("tape",))
    with pytest.raises(InputError, match="at least one part"):
        StoreSettings(parts=())
    with pytest.raises(InputError, match="unknown shape 'gpt'"):
        GetSettings((("gpt", 1),))
    with pytest.raises(InputError, match="rows is 3; at least 64"):
        IndexSettings(rows=3)
    with pytest.raises(InputError, match="puts is 0; at least 1"):
        IndexSettings(puts=0)
    with pytest.raises(InputError, match="a mode is no blend"):
        ModelSettings(modes=("full",))
    with pytest.raises(InputError, match="rounds is 0; at least 1"):
        ModelSettings(rounds=0)
    with pytest.raises(InputError, match="need a model"):
        run_store(StoreSettings(parts=("put",)))
