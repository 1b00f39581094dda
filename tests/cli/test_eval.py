"""`blendkv eval` on a tiny model: run, go on, report, compare, and what wrong input gets."""

from __future__ import annotations

import json

import pytest
from tiny_hub import TOPICS

MODES = "full,reuse,blend:strided@0.3"


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "questions.jsonl"
    names = list(TOPICS)[:5]
    with path.open("w", encoding="utf-8") as file:
        for number, name in enumerate(names):
            contexts = [TOPICS[names[(number + k) % len(names)]] for k in range(3)]
            line = {"question": f"What of {name}?", "answers": [TOPICS[name].split()[0]], "contexts": contexts}
            file.write(json.dumps(line) + "\n")
    return path


def test_a_run_and_what_follows(cli, data, llama_folder, tmp_path):
    options = ("--data", data, "--format", "jsonl", "--model", llama_folder, "--repeats", 1, "--deviation-items", 1)
    done = cli("eval", "run", *options, "--modes", MODES, "--limit", 2, "--out", tmp_path / "a", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["command"] == "eval run"
    assert [r["mode"] for r in found["rows"]] == MODES.split(",")
    assert [r["n"] for r in found["rows"]] == [2, 2, 2]
    names = ("run.json", "items.jsonl", "results.jsonl", "summary.json", "report.html")
    assert all((tmp_path / "a" / name).stat().st_size for name in names)
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == found["rows"]

    lines = (tmp_path / "a" / "results.jsonl").read_text()
    more = cli("eval", "run", *options, "--modes", f"{MODES},epic@4", "--limit", 3, "--out", tmp_path / "a", "--json")
    assert [r["n"] for r in json.loads(more.out)["rows"]] == [3, 3, 3, 3]
    assert (tmp_path / "a" / "results.jsonl").read_text().startswith(lines)

    (tmp_path / "a" / "report.html").unlink()
    again = cli("eval", "report", tmp_path / "a")
    assert again.code == 0
    assert "epic@4" in again.out
    assert (tmp_path / "a" / "report.html").is_file()

    load = ("--load-requests", 3, "--load-rate", 500)
    cli("eval", "run", *options, "--modes", MODES, "--limit", 2, *load, "--seed", 1, "--out", tmp_path / "b")
    rows = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert [r["load"]["requests"] for r in rows] == [3, 3, 3]

    compared = cli("eval", "compare", tmp_path / "a", tmp_path / "b")
    assert compared.code == 0
    assert "seed" in compared.out
    rows = json.loads(cli("eval", "compare", tmp_path / "a", tmp_path / "b", "--json").out)["rows"]
    assert {r["mode"]: r["kl"] and r["kl"]["estimate"] for r in rows}["reuse"] == pytest.approx(1.0, abs=0.01)


def test_red_correctness_ends_with_one(cli, data, llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("blendkv.eval.subject_torch.TorchSubject.budget_one", lambda *given: 1.0)
    options = ("--data", data, "--model", llama_folder, "--modes", "full,reuse", "--limit", 1, "--out", tmp_path / "r")
    done = cli("eval", "run", *options)
    assert done.code == 1
    assert "correctness is red" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--modes", "fast"), "unknown mode"),
        (("run", "--chunks", "0"), "chunks is 0"),
        (("run", "--data", "nowhere.jsonl", "--format", "jsonl"), "nowhere.jsonl"),
        (("run", "--format", "xml"), "xml"),
    ],
)
def test_wrong_input_gets_one_line(cli, tmp_path, arguments, words):
    done = cli("eval", *arguments, "--out", tmp_path / "x")
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_folders_without_a_run(cli, tmp_path):
    for arguments in (("report", tmp_path), ("compare", tmp_path, tmp_path)):
        done = cli("eval", *arguments)
        assert done.code == 2
        assert "holds no run" in done.err
