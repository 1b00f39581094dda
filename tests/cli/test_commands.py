"""Every command: its JSON object, its text, and its way to end."""

from __future__ import annotations

import json
import re

import pytest
from tiny_hub import TOPICS, write_corpus

from blendkv import __version__

SUMMARY = {
    "mode", "selector", "budget_asked", "budget_spent", "n", "f1", "em", "rouge_l", "kl", "kl_se", "top1", "ttft_ms",
    "speedup_p50", "bytes_loaded",
}  # fmt: skip


def whole(result, command):
    """The one JSON object on standard output, checked for what all of them share."""
    assert result.err == ""
    found = json.loads(result.out)
    assert found["command"] == command
    assert found["version"] == __version__
    assert {"date", "cpu", "cores", "threads", "gpu", "torch", "transformers", "blendkv"} <= found["environment"].keys()
    assert isinstance(found["rows"], list)
    return found


def test_ingest(cli, tmp_path, llama_folder):
    corpus = write_corpus(tmp_path / "corpus")
    arguments = ("ingest", corpus, "--store", tmp_path / "s", "--model", llama_folder, "--chunk-tokens", 48)
    row = whole(cli(*arguments, "--json"), "ingest")["rows"][0]
    assert row["documents"]["added"] == len(TOPICS)
    assert row["kv_computed"] > 0
    assert row["unsupported"] is None
    again = cli(*arguments)
    assert again.code == 0
    assert f"0 added, 0 changed, {len(TOPICS)} unchanged" in again.out
    assert "0 computed" in again.out
    assert again.err == ""
    lazy = cli("ingest", corpus, "--store", tmp_path / "s2", "--model", llama_folder, "--precompute", "lazy")
    assert "left for their first use" in lazy.out


def test_unsupported_model(cli, tmp_path, gpt2_folder):
    corpus = write_corpus(tmp_path / "corpus", ["with"])
    made = cli("ingest", corpus, "--store", tmp_path / "s", "--model", gpt2_folder)
    assert (made.code, made.err) == (0, "")
    assert "this model is not blended: layer 0 moves its keys" in made.out
    asked = cli("ask", "What?", "--store", tmp_path / "s", "--max-new-tokens", 4)
    assert asked.code == 0
    assert len([line for line in asked.err.splitlines() if line.startswith("warning:")]) == 1
    assert "full prefill because" in asked.err


@pytest.mark.parametrize("mode", ["full", "reuse", "blend"])
def test_ask(cli, store, mode):
    result = cli("ask", "What is lambda?", "--store", store, "--max-new-tokens", 8, "--mode", mode)
    assert result.code == 0
    as_json = cli("ask", "What is lambda?", "--store", store, "--max-new-tokens", 8, "--mode", mode, "--json")
    row = whole(as_json, "ask")["rows"][0]
    assert result.out.strip() == row["text"].strip()
    assert [line for line in result.err.splitlines() if line.startswith("source: corpus/lambda.txt#0")]
    assert "ttft" in result.err
    assert row["mode"].startswith(mode)
    assert row["timings"].keys() >= {"retrieve", "question", "ttft", "total"}
    assert row["sources"][0]["metadata"]["title"] == "lambda"
    assert (row["blend"] is None) == (mode == "full")


def test_ask_with_a_plan(cli, store):
    asked = ("ask", "What is lambda?", "--store", store, "--max-new-tokens", 4, "--plan")
    plan = whole(cli(*asked, "--json"), "ask")["rows"][0]["plan"]
    assert plan.keys() == {"recompute", "budget_asked", "budget", "predicted", "retried"}
    assert plan["budget_asked"] == 0.05
    assert plan["predicted"]["total"] > 0
    assert re.search(r"; planned: \d stored chunks computed, budget [\d.]+, \d+ ms$", cli(*asked).err.strip())
    assert whole(cli(*asked[:-1], "--json"), "ask")["rows"][0]["plan"] is None
    full = cli(*asked, "--mode", "full")
    assert (full.code, "planned" in full.err) == (0, False)


def test_answer_may_look_like_markup(cli, store, monkeypatch):
    from blendkv.engines.torch.decode import TextOutput

    monkeypatch.setattr(TextOutput, "push", lambda self, token: "[bold]x[/nope]\n")
    result = cli("ask", "What is lambda?", "--store", store, "--max-new-tokens", 2)
    assert result.code == 0
    assert result.out.startswith("[bold]x[/nope]\n[bold]x[/nope]\n")


def test_where(cli, store):
    def titles(*filters):
        result = cli("ask", "What?", "--store", store, "--max-new-tokens", 2, "--json", *filters)
        return {s["metadata"]["title"] for s in json.loads(result.out)["rows"][0]["sources"]}, result.err

    assert titles("--where", "title=with") == ({"with"}, "")
    assert titles("--where", "title=with", "--where", "title=scope") == ({"with", "scope"}, "")
    found, said = titles("--where", "title=with", "--where", "source=elsewhere")
    assert found == set()
    assert said == "warning: no passage was found, the answer is the model's own\n"


def test_where_knows_numbers(cli, tmp_path, llama_folder):
    rows = [{"text": f"Row {n} of the year. " * 4, "year": n, "name": str(n), "draft": n == 2024} for n in (2023, 2024)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert cli("ingest", tmp_path / "rows.jsonl", "--store", tmp_path / "s", "--model", llama_folder).code == 0
    for condition in ("year=2024", "draft=true", "name=2024"):
        result = cli("ask", "Row?", "--store", tmp_path / "s", "--where", condition, "--json", "--max-new-tokens", 2)
        sources = json.loads(result.out)["rows"][0]["sources"]
        assert [s["metadata"]["year"] for s in sources] == [2024]


def test_store_commands(cli, store):
    rows = whole(cli("store", "ls", "--store", store, "--json"), "store ls")["rows"]
    key = rows[0]["key"]
    assert {"key", "fingerprint", "recipe", "tokens", "nbytes", "last_used", "pinned", "tiers"} <= rows[0].keys()
    assert key[:16] in cli("store", "ls", "--store", store).out
    stat = whole(cli("store", "stat", "--store", store, "--json"), "store stat")
    assert [t["name"] for t in stat["rows"]] == ["memory", "disk"]
    assert stat["rows"][1]["chunks"] == stat["models"][0]["chunks"] == len(rows)
    assert str(len(rows)) in cli("store", "stat", "--store", store).out
    assert whole(cli("store", "verify", "--store", store, "--json"), "store verify")["rows"][0]["checked"] == len(rows)
    assert f"{len(rows)} chunk KVs are whole" in cli("store", "verify", "--store", store).out
    assert whole(cli("store", "pin", key[:10], "--store", store, "--json"), "store pin")["rows"] == [
        {"key": key, "did": "pinned"}
    ]
    pinned = whole(cli("store", "ls", "--store", store, "--json"), "store ls")["rows"]
    assert [r["key"] for r in pinned if r["pinned"]] == [key]
    report = whole(cli("store", "gc", "--store", store, "--disk", "1B", "--json"), "store gc")["rows"][0]
    assert report["evicted"] == len(rows) - 1
    assert "evicted 0" in cli("store", "gc", "--store", store).out
    assert "unpinned 1" in cli("store", "unpin", key, "--store", store).out
    assert "removed 1" in cli("store", "rm", key, "--store", store).out
    assert whole(cli("store", "ls", "--store", store, "--json"), "store ls")["rows"] == []


def test_verify_finds_damage(cli, store):
    path = next(store.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = cli("store", "verify", "--store", store, "--json")
    assert result.code == 1
    assert len(json.loads(result.out)["rows"][0]["damaged"]) == 1
    assert "is damaged" in result.err
    assert cli("store", "verify", "--store", store).code == 0


def test_repairs_are_said_beside_the_json(cli, store):
    next(store.rglob("*.safetensors")).unlink()
    result = cli("store", "ls", "--store", store, "--json")
    assert json.loads(result.out)["command"] == "store ls"
    assert "repaired" in result.err


def test_plan(cli, llama_folder, tmp_path):
    arguments = ("plan", "--tokens", 1000, "--model", llama_folder, "--folder", tmp_path)
    found = whole(cli(*arguments, "--json"), "plan")
    assert [r["tier"] for r in found["rows"]] == ["memory", "disk"]
    for row in found["rows"]:
        assert row["bytes"] == 1000 * found["kv_bytes_per_token"] == 1000 * 1024
        assert row["load_s"] == pytest.approx(row["bytes"] / row["bytes_per_s"])
        assert row["decision"] == ("load" if row["load_s"] < row["recompute_s"] else "recompute")
    assert "next_gb_saves_s_per_hour" not in found
    shown = cli(*arguments, "--threads", 1)
    assert "1,000 tokens, 1,024 bytes each" in shown.out
    assert "1 GB more" not in shown.out


def test_doctor(cli, llama_folder, gpt2_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    rows = whole(cli("doctor", "--json", "--model", llama_folder), "doctor")["rows"]
    assert {"part", "name", "works", "detail"} == rows[0].keys()
    model, gate = rows[-2:]
    assert model["works"]
    assert "can be blended: 4 layers, float32" in model["detail"]
    assert gate["part"] == "gate"
    assert cli("doctor").code == 0
    refused = cli("doctor", "--model", gpt2_folder)
    assert refused.code == 1
    missing = json.loads(cli("doctor", "--json", "--model", tmp_path / "none").out)["rows"][-1]
    assert missing["works"] is False
    assert "is no model folder" in missing["detail"]
    monkeypatch.setattr("blendkv.cli.doctor.importlib.util.find_spec", lambda name: None)
    hint = cli("doctor")
    assert "blendkv[demo]" in "".join(hint.out.split())  # not taken for markup


def test_doctor_without_a_home(cli, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "file" / "home"))
    result = cli("doctor", "--json")
    assert result.code == 1
    disk = next(r for r in json.loads(result.out)["rows"] if r["name"] == "disk")
    assert "set BLENDKV_HOME to a folder that can be written" in disk["detail"]


def test_bench(cli, llama_folder):
    arguments = (
        "bench", "ttft", "--model", llama_folder, "--chunks", 2, "--chunk-tokens", 40, "--repeats", 1,
        "--modes", "full, reuse", "--tiers", "memory",
    )  # fmt: skip
    found = whole(cli(*arguments, "--json"), "bench ttft")
    more = {"engine", "tier", "ideal_speedup", "stages_ms", "peak_extra_bytes"}
    assert [set(row) for row in found["rows"]] == [SUMMARY | more] * 2
    assert found["correct"] is True
    shown = cli(*arguments)
    assert "speed-up" in shown.out
    assert "budget 1: KL" in shown.out


def test_demo(cli, deep, tmp_path, monkeypatch):
    """The command around a tiny model and corpus; `make demo` runs the real one."""
    from blendkv.engines.torch.engine import TorchEngine

    corpus = write_corpus(tmp_path / "corpus")
    monkeypatch.setattr(TorchEngine, "load", classmethod(lambda cls, name, **options: deep))
    monkeypatch.setattr("blendkv.eval.demo.CORPUS", str(corpus))
    arguments = ("demo", "--store", tmp_path / "s", "--questions", 1, "--threads", 1)
    found = whole(cli(*arguments, "--json"), "demo")
    assert [set(row) for row in found["rows"]] == [SUMMARY] * len(found["rows"])
    assert found["rows"][0]["mode"] == "full"
    assert set(found["items"][0]["answers"]) == {row["mode"] for row in found["rows"]}
    shown = cli("demo", "--store", tmp_path / "s", "--questions", 2)
    assert "KL to full" in shown.out
    assert f"{len(TOPICS)} topics" in shown.err


def test_version_and_help(cli):
    assert cli("--version").out == f"blendkv {__version__}\n"
    for arguments in ((), ("--help",), ("store", "--help"), ("bench", "--help")):
        result = cli(*arguments)
        assert (result.code, result.err) == (0, "")
        assert "Usage:" in result.out
