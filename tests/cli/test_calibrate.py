"""`calibrate`, and what its verdict does to `ask`, `serve` and `doctor`."""

from __future__ import annotations

import json

import pytest
from homes import own_home
from verdicts import put_verdict

from blendkv.blend.gate import read_verdict, verdict_path

WIDE = ("--kl", 1000, "--f1", 1)


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(own_home(tmp_path / "home")))
    return tmp_path / "home"


@pytest.fixture
def sample(tmp_path):
    """Eight questions with two short passages each."""
    rows = [
        {
            "question": f"What is number {n}?",
            "answers": [str(n)],
            "contexts": [f"Number {n} is {n}.", "A lambda is one."],
        }
        for n in range(8)
    ]
    path = tmp_path / "sample.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def calibrate(cli, sample, *options):
    modes = "blend:strided@0.5,blend:chunk_head@0.3"
    return cli("calibrate", "--data", sample, "--format", "jsonl", "--modes", modes, *options)


def ask(cli, store, *options):
    result = cli("ask", "What is lambda?", "--store", store, "--max-new-tokens", 2, "--json", *options)
    return json.loads(result.out)["rows"][0] if result.code == 0 else result


def test_a_model_that_passes(cli, store, sample, llama):
    result = calibrate(cli, sample, "--store", store, *WIDE, "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["command"] == "calibrate"
    assert found["passed"]
    assert found["path"] == str(verdict_path(store, llama.fingerprint))
    assert found["data"]["source"] == str(sample)
    assert found["target"] == {"kl": 1000, "f1": 1, "confidence": 0.95}
    assert {row["mode"] for row in found["rows"]} == {"blend:strided@0.5", "blend:chunk_head@0.3"}
    verdict = read_verdict(store, llama.fingerprint)
    assert (verdict.mode, verdict.engine, verdict.recipe, verdict.dtype) == (
        found["mode"],
        "torch",
        "system",
        "float32",
    )

    assert ask(cli, store)["mode"] == found["mode"]
    assert ask(cli, store, "--mode", "reuse")["mode"] == "reuse"
    assert ask(cli, store, "--budget", "0.5")["mode"] == "blend:head_query@0.5"
    assert ask(cli, store, "--require-gate")["mode"] == found["mode"]
    refused = ask(cli, store, "--require-gate", "--mode", "reuse")
    assert refused.code == 2
    assert "the quality gate is required and did not pass reuse; it passed" in refused.err

    told = cli("doctor", "--store", store, "--json")
    row = next(r for r in json.loads(told.out)["rows"] if r["part"] == "gate")
    assert row["works"]
    assert row["detail"].startswith(f"passed, blends with {found['mode']}; {verdict.date}: ")


def test_a_model_that_fails(cli, store, sample, llama_folder, llama, user_folder):
    result = calibrate(cli, sample, "--model", llama_folder, "--kl", "1e-9")
    assert result.code == 0
    assert "quality gate of" in result.out
    assert "failed" in result.out
    assert "quality: the closest mode" in result.out
    assert (
        f"written to {verdict_path(user_folder, llama.fingerprint)}: prompts of this model are prefilled" in result.out
    )
    answer = ask(cli, store)
    assert (answer["mode"], answer["blend"]) == ("full", None)
    assert "the quality gate did not pass this model: quality: " in answer["fallback"]
    refused = ask(cli, store, "--require-gate")
    assert refused.code == 2
    assert len(refused.err.splitlines()) == 1
    assert f"blendkv calibrate --model {llama_folder} --store {store}" in refused.err

    for options in (("--model", llama_folder), ("--store", store), ("--model", llama_folder, "--store", store)):
        told = cli("doctor", *options, "--json")
        assert told.code == 1
        (row,) = [r for r in json.loads(told.out)["rows"] if r["part"] == "gate"]
        assert row["name"] == str(store if "--store" in options else llama_folder)
        assert not row["works"]
        assert "failed, every prompt is prefilled in full" in row["detail"]


def test_a_model_that_was_not_measured(cli, store, llama_folder):
    told = cli("doctor", "--model", llama_folder, "--json")
    (row,) = [r for r in json.loads(told.out)["rows"] if r["part"] == "gate"]
    assert row["works"]
    assert row["detail"] == f"not measured, blended anyway: run blendkv calibrate --model {llama_folder}"
    refused = ask(cli, store, "--require-gate")
    assert refused.code == 2
    assert "has not measured this model: run blendkv calibrate" in refused.err
    assert ask(cli, store, "--require-gate", "--mode", "full")["mode"] == "full"


def test_doctor_where_there_is_no_verdict_to_read(cli, store, llama, tmp_path):
    put_verdict(store, llama.fingerprint).write_text("{")
    for folder, why in ((store, "holds no gate verdict"), (tmp_path / "none", "holds no store")):
        told = cli("doctor", "--store", folder, "--json")
        assert told.code == 1
        assert why in next(r for r in json.loads(told.out)["rows"] if r["part"] == "gate")["detail"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--kl", "0"), ("KL is 0", "more than 0")),
        (("--f1", "2"), ("F1 margin is 2", "0 to 1")),
        (("--confidence", "1"), ("confidence is 1", "0.5 to below 1")),
        (("--limit", "5"), ("5 items are too few", "8 or more")),
        (("--modes", "full"), ("full cannot be calibrated", "reuse or blend:SELECTOR@BUDGET")),
        (("--modes", ","), ("no mode is given",)),
        (("--store", "/nowhere"), ("/nowhere holds no store",)),
    ],
)
def test_wrong_input(cli, sample, llama_folder, options, parts):
    result = calibrate(cli, sample, "--model", llama_folder, *options)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    for part in parts:
        assert part in result.err


def test_another_model_than_the_store_s(cli, store, sample, other_folder, llama):
    result = calibrate(cli, sample, "--store", store, "--model", other_folder)
    assert result.code == 2
    assert "use that model" in result.err
    assert not verdict_path(store, llama.fingerprint).exists()
