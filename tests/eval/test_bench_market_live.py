"""`bench market-live`: the load, both sides over real servers, what is refused, wrong input."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from blendkv.cli.main import app
from blendkv.errors import BlendKVError, InputError
from blendkv.eval.bench.market_live_drive import Seen
from blendkv.eval.bench.market_live_load import NAME, PER_CHAT, PER_QUESTION, PER_SINGLE, Load, ask_body, make_load
from blendkv.eval.bench.market_live_rows import CLASSES, Side, live_result
from blendkv.eval.bench.market_live_settings import LiveSettings
from blendkv.eval.bench.serve_process import ServeProcess


def test_the_command(llama_folder):
    """Two servers, the same requests; no assertion on times."""
    result = CliRunner().invoke(
        app,
        ["bench", "market-live", "--quick", "--requests", "16", "--rate", "20", "--speed", "60", "--share", "0.15",
         "--model", str(llama_folder), "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["command"], told["problems"]) == ("bench market-live", [])
    assert [(r["class"], r["policy"]) for r in told["rows"]] == [
        (kind, policy) for kind in (*CLASSES, "all") for policy in ("lru", "market")
    ]
    both = [r for r in told["rows"] if r["class"] == "all"]
    assert both[0]["requests"] == both[1]["requests"] == 16 - int(0.2 * 16)
    assert both[0]["p99_speedup"] == 1.0
    assert (both[1]["p99_speedup"] is None) == any("not equally busy" in note for note in told["notes"])
    lru, market = told["rounds"]
    assert (lru["policy"], market["policy"]) == ("lru", "market")
    assert lru["hits"] + lru["computed"] == market["hits"] + market["computed"] > 0
    assert lru["memory_evictions"] > 0
    assert market["refused_by_price"] + market["memory_evictions"] > 0
    assert set(lru["hints"]) <= {"not heard", "late"}
    assert set(market["hints"]) <= {"heard", "late"}


def test_a_load_is_the_same_for_the_same_seed():
    assert make_load(3, 60, 1.5, 4.0, 40, 32) == make_load(3, 60, 1.5, 4.0, 40, 32)
    assert make_load(3, 60, 1.5, 4.0, 40, 32) != make_load(4, 60, 1.5, 4.0, 40, 32)


def test_what_a_load_asks_for():
    load = make_load(2, 200, 1.5, 4.0, 40, 32)
    assert {ask.use.workload for ask in load.asks} == set(CLASSES)
    assert [ask.at for ask in load.asks] == sorted(ask.at for ask in load.asks)
    by_session = defaultdict(list)
    seen_once = []
    for ask in load.asks:
        assert set(ask.passages) <= load.passages.keys()
        by_session[ask.use.workload, ask.use.session].append(ask)
        if ask.use.workload == "single":
            seen_once += ask.passages
            assert len(ask.passages) == PER_SINGLE
    assert len(set(seen_once)) == len(seen_once)
    assert all(len(ask.passages) == PER_QUESTION for ask in by_session["rag", ""])
    for (kind, _), asks in by_session.items():
        if kind in ("agent", "chat"):
            assert [ask.turn for ask in asks] == list(range(len(asks)))
            for before, after in pairwise(asks):
                if kind == "chat":
                    assert before.passages == after.passages
                    assert len(before.passages) == PER_CHAT
                    assert before.messages[-1] in after.messages
                else:
                    assert after.passages[: len(before.passages)] == before.passages
                    assert len(after.passages) == len(before.passages) + 1


def test_time_runs_faster_at_the_same_rate():
    """All gaps and time-outs of a session shrink together."""
    slow, fast = make_load(5, 200, 1.0, 1.0, 40, 32), make_load(5, 200, 8.0, 8.0, 40, 32)
    assert [ask.use for ask in slow.asks] == [ask.use for ask in fast.asks]
    assert [ask.at for ask in slow.asks] == pytest.approx([8 * ask.at for ask in fast.asks])
    assert [ask.ttl for ask in slow.asks] == pytest.approx([8 * ask.ttl for ask in fast.asks])


def test_a_request_names_its_passages(tmp_path):
    load = make_load(2, 20, 1.5, 4.0, 40, 32)
    body = ask_body(load.asks[0], "m", "reuse", 3)
    assert body["blendkv"]["where"] == {NAME: list(load.asks[0].passages)}
    load.write(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["metadata"][NAME]: row["text"] for row in rows} == load.passages
    assert len({row["text"] for row in rows}) == len(rows)


def side(policy: str, load: Load, seconds: float, **change: object) -> Side:
    seen = [answered(seconds) for _ in load.asks]
    if change:
        seen[1] = replace(seen[1], **change)  # type: ignore[arg-type]
    counted = {"hits": 9.0, "computed": 3.0, "computed_tokens": 300.0}
    return Side(policy, 1, load, seen, counted, 1000, 0)


def answered(seconds: float, outcome: str = "blended", prepare: float = 0.1) -> Seen:
    told = {
        "outcome": outcome, "sources": [{"id": "a"}], "tokens": {"reused": 9, "fresh": 1}, "budget_spent": 0.05,
        "seconds": {"prepare": prepare, "queue": 0.0},
    }  # fmt: skip
    return Seen(seconds, "words", told)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text": "other words"}, "1 of 12 answers differ in text"),
        ({"error": "ReadTimeout: ", "told": None}, "1 requests were not answered: ReadTimeout"),
        ({"told": answered(1.0, "fallback").told}, "1 answers are fallback, not blended"),
    ],
)
def test_no_ratio_while_answers_are_wrong(change, problem):
    load = make_load(1, 12, 4.0, 4.0, 20, 32)
    settings = LiveSettings(seeds=(1,), requests=12)
    good = live_result([side("lru", load, 2.0), side("market", load, 1.0)], settings)
    assert good.problems == []
    assert [r["p50_speedup"] for r in good.rows if r["class"] == "all"] == [1.0, 2.0]
    bad = live_result([side("lru", load, 2.0), side("market", load, 1.0, **change)], settings)
    assert any(problem in line for line in bad.problems)
    assert all(r["p50_speedup"] is None and r["prepare_speedup"] is None for r in bad.rows)


def test_no_ratio_of_times_on_a_machine_that_was_not_equally_busy():
    load = make_load(1, 12, 4.0, 4.0, 20, 32)
    slow, fast = side("lru", load, 2.0), side("market", load, 1.0)
    slow.seen = [answered(2.0, prepare=0.2) for _ in load.asks]
    result = live_result([slow, fast], LiveSettings(seeds=(1,), requests=12))
    assert result.problems == []
    assert any("not equally busy" in note for note in result.notes)
    assert all((r["p50_speedup"] is None) == (r["policy"] == "market") for r in result.rows if r["requests"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0}, {"rate": 0.0}, {"speed": float("nan")}, {"share": 1.5}, {"corpus": 4}, {"words": 0},
        {"warm_up": 1.0}, {"policies": ()},
        {"policies": ("lru", "lru")}, {"policies": ("lru", "never-heard-of")}, {"mode": "full"}, {"seeds": ()},
    ],
)  # fmt: skip
def test_wrong_settings(wrong):
    with pytest.raises(InputError):
        LiveSettings(**wrong)


def test_a_server_that_does_not_start(tmp_path):
    with pytest.raises(BlendKVError, match=r"ended with \d+ before it served"):
        ServeProcess(tmp_path / "store", str(tmp_path / "nowhere"), ())


def test_a_policy_is_the_embedded_engines(tmp_path):
    command = ["serve", "--store", str(tmp_path), "--engine", "vllm", "--policy", "lru"]
    with pytest.raises(InputError, match="--policy is for --engine torch"):
        CliRunner().invoke(app, command, catch_exceptions=False, standalone_mode=False)
