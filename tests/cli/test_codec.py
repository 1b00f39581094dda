"""`--codec` of ingest, eval run and calibrate."""

from __future__ import annotations

import json

import pytest
from tiny_hub import SYSTEM, TOPICS, write_corpus

from blendkv.blend.codec_choice import default_codec
from blendkv.blend.gate import read_verdict
from blendkv.config import home

MODES = "full,reuse,blend:strided@0.3"


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A home of its own, for a verdict; compiled kernels are the other's."""
    own = tmp_path / "home"
    own.mkdir()
    (own / "kernels").symlink_to(home() / "kernels")
    monkeypatch.setenv("BLENDKV_HOME", str(own))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "questions.jsonl"
    names = list(TOPICS)[:5]
    rows = [
        {"question": f"What of {n}?", "answers": ["A"], "contexts": [TOPICS[names[n % 5]], TOPICS[names[(n + 2) % 5]]]}
        for n in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(result):
    assert result.code == 0, result.err
    return json.loads(result.out)["rows"]


def test_ingest_and_ask(cli, llama_folder, tmp_path):
    corpus, store = write_corpus(tmp_path / "corpus"), tmp_path / "s"
    options = ("--store", store, "--model", llama_folder, "--chunk-tokens", 48, "--system", SYSTEM, "--json")
    (made,) = rows(cli("ingest", corpus, *options, "--codec", "int8"))
    listed = rows(cli("store", "ls", "--store", store, "--json"))
    assert sum(row["recipe"]["codec"] == "int8" for row in listed) == made["kv_computed"] == len(listed) - 1
    (again,) = rows(cli("ingest", corpus, *options))
    assert again["kv_computed"] == 0
    asked = ("What is lambda?", "--store", store, "--mode", "reuse", "--max-new-tokens", 2, "--top-k", 2, "--json")
    (answer,) = rows(cli("ask", *asked))
    assert (answer["mode"], answer["fallback"]) == ("reuse", None)
    assert len(rows(cli("store", "ls", "--store", store, "--json"))) == len(listed)


@pytest.mark.parametrize(
    "command",
    [
        ("ingest", "CORPUS", "--store", "STORE"),
        ("eval", "run", "--out", "STORE"),
        ("calibrate", "--store", "STORE"),
    ],
)
def test_an_unknown_codec_gets_one_line(cli, command, tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    places = {"CORPUS": corpus, "STORE": tmp_path / "s"}
    result = cli(*(places.get(word, word) for word in command), "--codec", "zip")
    assert result.code == 2
    assert result.err.strip() == "error: unknown codec 'zip'; allowed: raw, fp8, int8, turbo4, turbo3, turbo2"
    assert not (tmp_path / "s").exists()


def test_eval_measures_what_a_store_gives_back(cli, data, llama_folder, tmp_path):
    options = ("--data", data, "--format", "jsonl", "--model", llama_folder, "--repeats", 1, "--deviation-items", 0)
    options = (*options, "--limit", 2, "--modes", MODES, "--json")
    kl = {}
    for codec in ("raw", "int8", "turbo2"):
        found = rows(cli("eval", "run", *options, "--codec", codec, "--out", tmp_path / codec))
        kl[codec] = {row["mode"]: row["kl"] for row in found}
        told = json.loads((tmp_path / codec / "run.json").read_text())
        assert (told["codec"], told["correct"]) == (codec, True)
    assert kl["raw"]["full"] == kl["turbo2"]["full"]
    raw, near, far = (kl[codec]["reuse"] for codec in ("raw", "int8", "turbo2"))
    assert 0 < abs(near - raw) < abs(far - raw)
    refused = cli("eval", "run", *options, "--codec", "int8", "--out", tmp_path / "raw")
    assert refused.code == 2
    changed = json.loads(cli("eval", "compare", tmp_path / "raw", tmp_path / "int8", "--json").out)["differing"]
    assert {"setting": "codec", "a": "raw", "b": "int8"} in changed


def test_calibrate_judges_a_codec(cli, data, llama, llama_folder, user_folder, tmp_path):
    corpus, store = write_corpus(tmp_path / "corpus"), tmp_path / "s"
    cli("ingest", corpus, "--store", store, "--model", llama_folder, "--codec", "turbo4", "--precompute", "lazy")
    wide = ("--data", data, "--format", "jsonl", "--modes", "blend:strided@0.5", "--kl", 1000, "--f1", 1, "--json")
    found = cli("calibrate", "--store", store, *wide)
    assert found.code == 0, found.err
    assert read_verdict(store, llama.fingerprint, "turbo4").codec == "turbo4"  # the store's own
    told = cli("calibrate", "--model", llama_folder, "--codec", "int8", *wide)
    assert told.code == 0, told.err
    assert json.loads(told.out)["data"]["codec"] == "int8"


def test_calibrate_chooses_a_codec_and_a_new_store_takes_it(cli, data, llama, llama_folder, user_folder, tmp_path):
    wide = ("--data", data, "--format", "jsonl", "--modes", "blend:strided@0.5", "--kl", 1000, "--f1", 1)
    found = cli("calibrate", "--model", llama_folder, "--codec", "auto", *wide, "--json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    choice = told["choice"]
    assert told["data"]["codec"] == choice["codec"]
    assert [row["codec"] for row in choice["rows"]] == ["int8", "turbo4", "turbo3", "turbo2"]
    assert not choice["rows"][-1]["passed"], "2 bits are too few for any model"
    assert read_verdict(None, llama.fingerprint, choice["codec"]).passed
    assert read_verdict(None, llama.fingerprint).passed, "raw was judged too"
    assert default_codec(None, llama.fingerprint) == choice["codec"]
    corpus, store = write_corpus(tmp_path / "corpus"), tmp_path / "s"
    options = ("--store", store, "--model", llama_folder, "--chunk-tokens", 48, "--json")
    (made,) = rows(cli("ingest", corpus, *options))
    listed = rows(cli("store", "ls", "--store", store, "--json"))
    assert sum(row["recipe"]["codec"] == choice["codec"] for row in listed) >= made["kv_computed"] > 0
    (gate,) = [r for r in rows_of(cli("doctor", "--store", store, "--json")) if r["part"] == "gate"]
    assert gate["works"]
    assert gate["detail"].startswith("passed, blends with blend:strided@0.5")

    shown = cli("calibrate", "--store", store, "--codec", "auto", *wide)
    assert shown.code == 0, shown.err
    assert "codecs of" in shown.out
    assert "ingest with --codec makes the store use it" in " ".join(shown.out.split())


def test_a_codec_is_chosen_by_the_embedded_engine_only(cli, data, llama_folder):
    refused = cli("calibrate", "--model", llama_folder, "--data", data, "--codec", "auto", "--engine", "vllm")
    assert refused.code == 2
    assert refused.err.strip() == (
        "error: --codec auto is measured by --engine torch, given vllm; the choice holds for both"
    )


def rows_of(result):
    return json.loads(result.out)["rows"]
