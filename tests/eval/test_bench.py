"""The benchmark and the demo, whole, on tiny models: their rows, and no speed-up while correctness is red."""

from __future__ import annotations

import pytest
import torch
from tiny_hub import TOPICS, open_pipeline, write_corpus

from blendkv.cli.bench import _show
from blendkv.errors import InputError, PromptTooLongError, UnsupportedModelError
from blendkv.eval.bench.ttft import TtftSettings, run_ttft
from blendkv.eval.demo import run_demo
from blendkv.kernels import rope_shift_scatter_all

SUMMARY = [
    "mode", "selector", "budget_asked", "budget_spent", "n", "f1", "em", "rouge_l", "kl", "kl_se", "top1", "ttft_ms",
    "speedup_p50", "bytes_loaded",
]  # fmt: skip
SETTINGS = TtftSettings(chunks=3, chunk_tokens=40, repeats=2, modes=("full", "reuse", "blend:strided@0.2"))


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


def test_ttft(llama, capfd):
    told = []
    result = run_ttft(llama, SETTINGS, told.append)
    assert capfd.readouterr() == ("", "")
    assert result.correct
    assert result.budget_one.kl < 1e-5
    assert [(r["mode"], r["tier"]) for r in result.rows] == [
        ("full", None), ("reuse", "memory"), ("reuse", "disk"),
        ("blend:strided@0.2", "memory"), ("blend:strided@0.2", "disk"),
    ]  # fmt: skip
    full, *others = result.rows
    for row in result.rows:
        assert list(row) == [*SUMMARY, "engine", "tier", "ideal_speedup", "stages_ms", "peak_extra_bytes"]
        assert set(row["ttft_ms"]) == {"p20", "p50", "p80"}
        assert list(row["stages_ms"]) == ["score", "load", "rotate", "recompute", "question"]
        assert row["n"] == 1
        assert row["f1"] is row["em"] is row["rouge_l"] is row["kl_se"] is None
        assert row["speedup_p50"] == pytest.approx(full["ttft_ms"]["p50"] / row["ttft_ms"]["p50"], abs=1e-3)
    assert (full["speedup_p50"], full["ideal_speedup"], full["peak_extra_bytes"]) == (1.0, 1.0, None)
    assert set(full["stages_ms"].values()) == {None}
    for row in others:
        assert row["ideal_speedup"] > 1
        assert row["peak_extra_bytes"] > 0
        assert row["bytes_loaded"] >= 3 * 40 * llama.kv_bytes_per_token
        assert all(ms >= 0 for ms in row["stages_ms"].values())
    assert 0 < others[-1]["budget_spent"] <= 0.2 + 1e-9
    assert others[0]["kl"] > 1e-3
    assert told[-1] == "ingest rate against plain batched prefill"
    assert result.ingest.tokens == 120
    assert result.ingest.ratio == pytest.approx(result.ingest.ingest_tokens_per_s / result.ingest.prefill_tokens_per_s)


def without_rotation(moves, *places):
    rope_shift_scatter_all([move._replace(table=None) for move in moves], *places)


def test_no_speedup_while_correctness_is_red(llama, monkeypatch, capsys):
    """A rotation that does nothing garbles the keys; the rows then keep their times and lose their speed-ups."""
    monkeypatch.setattr("blendkv.blend.context.rope_shift_scatter_all", without_rotation)
    result = run_ttft(llama, SETTINGS)
    assert not result.correct
    assert [row["speedup_p50"] for row in result.rows] == [None] * 5
    assert all(row["ttft_ms"] for row in result.rows)
    _show(result, SETTINGS, "float32")
    assert "correctness is red" in capsys.readouterr().out


def test_the_command_exits_with_1_while_correctness_is_red(llama_folder, monkeypatch, capsys, own_logging):
    from blendkv.cli.main import main

    monkeypatch.setattr("blendkv.blend.context.rope_shift_scatter_all", without_rotation)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ttft", "--model", str(llama_folder), "--chunk-tokens", "40", "--repeats", "1", "--json",
              "--modes", "full,reuse", "--tiers", "memory"])  # fmt: skip
    assert ended.value.code == 1
    assert '"correct": false' in capsys.readouterr().out


def test_without_full_there_is_no_speedup(llama):
    result = run_ttft(llama, TtftSettings(2, 40, 1, 1, ("reuse",), ("memory",)))
    assert [row["speedup_p50"] for row in result.rows] == [None]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"repeats": 0}, "repeats is 0"), ({"tiers": ("tape",)}, "unknown tier tape"),
        ({"modes": ("x",)}, "unknown mode"),
        ({"modes": ()}, "name at least one"), ({"tiers": ()}, "name at least one"),
    ],
)  # fmt: skip
def test_wrong_settings(values, says):
    with pytest.raises(InputError, match=says):
        TtftSettings(**values)


def test_prompts_and_models_that_cannot_be_measured(llama, gpt2):
    with pytest.raises(PromptTooLongError, match="holds 2048"):
        run_ttft(llama, TtftSettings(chunks=30, chunk_tokens=100))
    with pytest.raises(InputError, match="fewer or smaller"):
        run_ttft(llama, TtftSettings(chunk_tokens=10**7))
    with pytest.raises(UnsupportedModelError, match="known rotation"):
        run_ttft(gpt2, SETTINGS)


def test_demo(llama, tmp_path):
    told = []
    questions = ["What does nonlocal do?", "And a decorator?"]
    modes = ("full", "reuse", "blend:head_query@0.2", "blend:strided@1")
    with open_pipeline(tmp_path / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "c")], precompute="lazy", chunk_tokens=48)
        result = run_demo(pipeline, questions, modes, told.append)
        assert pipeline.library.counts.computed > 0
    assert [row["mode"] for row in result.rows] == list(modes)
    assert all(list(row) == SUMMARY for row in result.rows)
    assert [row["n"] for row in result.rows] == [2] * 4
    assert result.rows[0]["speedup_p50"] == 1.0
    assert abs(result.rows[0]["kl"]) < 1e-6
    assert abs(result.rows[3]["kl"]) < 1e-4
    assert result.rows[1]["kl"] > 1e-3
    assert result.rows[3]["top1"] == 1.0
    assert all(row["kl_se"] is not None for row in result.rows)
    assert told == [f"question {n}/2: {q}" for n, q in enumerate(questions, 1)]
    for item, question in zip(result.items, questions, strict=True):
        assert item.question == question
        assert set(item.answers) == set(item.kl) == set(modes)
        assert item.answers["blend:strided@1"] == item.answers["full"]
        assert set(item.topics) <= set(TOPICS)
        assert "\n" not in "".join(item.answers.values())
