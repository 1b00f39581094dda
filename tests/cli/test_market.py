"""What a daemon's memory is worth, as `store stat --market` and `plan --store` show it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from daemon_process import MAIN, DaemonProcess, eventually

from blendkv.daemon.client import DaemonStore
from blendkv.market.base import Use
from blendkv.market.context import using


@pytest.fixture
def traded(tmp_path, make_kv):
    """A store whose daemon has held chunks of two classes, saved some seconds and missed some."""
    with DaemonProcess(tmp_path / "s", "16kB", "--policy", "market"), DaemonStore(tmp_path / "s", 20.0) as client:
        for number in range(6):
            with using(Use("agent", "loop") if number < 3 else Use("single")):
                client.put(make_kv(number))
        for number in range(6):
            with using(Use("agent", "loop") if number < 3 else Use("single")):
                assert client.get(make_kv(number).key, make_kv(number).token_ids) is not None
        eventually(lambda: client.daemon_stats().loans == 0)
        report = client.market()
        assert report.saved > 0
        assert report.gigabyte > 0
        yield tmp_path / "s", client


def test_the_price_list(cli, traded):
    root, client = traded
    found = json.loads(cli("store", "stat", "--store", root, "--market", "--json").out)["market"]
    report = client.market()
    assert [row["key"] for row in found["prices"]] == [price.key for price in report.prices]
    assert {row["class"] for row in found["prices"]} == {"agent", "single"}
    assert found["prices"][0].keys() == {
        "key", "bytes", "class", "kind", "age_s", "uses", "reuse", "horizon_s", "hit_saves_s", "saves_s_per_gb_hour"
    }  # fmt: skip
    prices = [row["saves_s_per_gb_hour"] for row in found["prices"]]
    assert prices == sorted(prices)
    assert prices[0] < prices[-1]
    assert found["saved_s"] == report.saved
    assert [(row["factor"], row["bytes"]) for row in found["what_if"]] == [
        (factor, round(report.limit * factor)) for factor in (1.5, 2.0, 4.0)
    ]
    assert found["what_if"][-1]["saved_s"] >= found["what_if"][0]["saved_s"] >= found["saved_s"]
    assert found["next_gb_saves_s_per_hour"] > 0
    short = cli("store", "stat", "--store", root, "--market", "--count", 2, "--json")
    assert len(json.loads(short.out)["market"]["prices"]) == 2
    assert "market" not in json.loads(cli("store", "stat", "--store", root, "--json").out)


def test_the_price_list_for_people(cli, traded):
    root, client = traded
    shown = cli("store", "stat", "--store", root, "--market")
    assert shown.code == 0, shown.err
    for words in ("price list", "P(reuse)", "s saved per GB and hour", "as it is", "x 1.5", "x 4", "agent", "single"):
        assert words in shown.out
    assert client.market().prices[0].key[:16] in shown.out
    assert cli("store", "stat", "--store", root, "--market", "--count", 0).code == 2


def test_the_price_list_tick_by_tick(traded):
    root, _ = traded
    command = [
        sys.executable,
        "-c",
        MAIN,
        "store",
        "stat",
        "--store",
        str(root),
        "--market",
        "--watch",
        "0.1",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        ticks = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.terminate()
    assert all(tick["market"]["prices"] for tick in ticks)
    assert ticks[1]["market"]["since_s"] > ticks[0]["market"]["since_s"]


def test_it_takes_a_daemon(cli, store, llama_folder, tmp_path):
    for options in ((), ("--watch", "1"), ("--json",)):
        refused = cli("store", "stat", "--store", store, "--market", *options)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err == (
            f"error: no daemon runs for the store {store}, and only a running one knows prices; start one: "
            f"blendkv daemon --store {store} --policy market\n"
        )
    asked = ("plan", "--tokens", 1000, "--model", llama_folder, "--folder", tmp_path, "--store", store)
    planned = cli(*asked, "--json")
    assert planned.code == 0
    assert json.loads(planned.out)["next_gb_saves_s_per_hour"] is None
    assert f"blendkv daemon --store {store} --policy market" in planned.err
    assert cli(*asked[:-1], tmp_path / "none").code == 2


def test_it_takes_a_policy_that_keeps_prices(cli, tmp_path):
    with DaemonProcess(tmp_path / "s", "1MB", "--policy", "lru"):
        refused = cli("store", "stat", "--store", tmp_path / "s", "--market")
    assert (refused.code, refused.out) == (2, "")
    assert "keeps no prices; choose market: blendkv daemon --policy market" in refused.err


def test_a_plan_tells_what_the_next_gigabyte_is_worth(cli, traded, llama_folder, tmp_path):
    root, client = traded
    asked = ("plan", "--tokens", 1000, "--model", llama_folder, "--folder", tmp_path, "--store", root)
    shown = cli(*asked)
    assert shown.code == 0, shown.err
    assert f"{root}: 1 GB more would save " in shown.out
    found = json.loads(cli(*asked, "--json").out)["next_gb_saves_s_per_hour"]
    assert found >= client.market().marginal > 0, "the same seconds, in a shorter time"
