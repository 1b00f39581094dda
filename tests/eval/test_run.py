"""A whole evaluation on a tiny model: every mode on every item, written down, resumed, summed up."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack

import pytest
import torch
from tiny_hub import SYSTEM, TOPICS

from blendkv.engines.base import GenerationOptions
from blendkv.errors import InputError, PromptTooLongError
from blendkv.eval import run as run_module
from blendkv.eval.fidelity import blended, reference
from blendkv.eval.items import EvalItem, RunFolder
from blendkv.eval.modes import parse_eval_mode, parse_eval_modes
from blendkv.eval.opening import Opening, measure_load
from blendkv.eval.run import EvalSettings, describe, run_eval
from blendkv.eval.subject import build, offsets_by_chunk
from blendkv.eval.subject_torch import TorchSubject
from blendkv.eval.summary import median_ttft, summarise, write_summary
from blendkv.store.tiered import KVStore

MODES = "full,prefix,reuse,blend:head_query@0.2,blend:strided@0.3+p8,blend:random@1,cacheblend@0.15,epic@4"
SETTINGS = EvalSettings(chunks=3, repeats=2, deviation_items=1)


def items(count: int, task: str = "qa") -> list[EvalItem]:
    names = list(TOPICS)
    return [
        EvalItem(
            f"{task}-{i}", f"What of {names[i]}?", (TOPICS[names[i]].split(".")[0],),
            tuple(f"{names[(i + k) % len(names)]}\n{TOPICS[names[(i + k) % len(names)]]}\n\n" for k in range(5)),
            task=task, max_new_tokens=20, meta={"topic": names[i]},
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture
def subject(llama):
    made = TorchSubject(llama, KVStore.open(None, memory_bytes=1 << 30), system=SYSTEM)
    yield made
    made.close()


def start(subject, folder, specs=MODES, count=2, settings=SETTINGS, given=None):
    meta = describe(subject, settings, "topics", "jsonl", torch.get_num_threads())
    return run_eval(subject, given or items(count), parse_eval_modes(specs), settings, RunFolder(folder), meta)


def test_every_mode_on_every_item(subject, llama, tmp_path):
    run = start(subject, tmp_path)
    specs = [m.spec for m in parse_eval_modes(MODES)]
    assert [(r.item, r.mode) for r in run.results] == [(f"qa-{i}", s) for i in range(2) for s in specs]
    assert run.meta["correct"] is True
    assert run.meta["budget_one_kl"] < 1e-4, "float32"
    by = {(r.item, r.mode): r for r in run.results}
    for item in items(2):
        built = build(subject, item, 3)
        own = llama.decoder(built.prompt.token_ids, None, GenerationOptions(max_new_tokens=20))
        text = "".join(own)
        for exact in ("full", "prefix", "blend:random@1"):
            result = by[item.id, exact]
            assert result.answer == text
            assert result.kl == pytest.approx(0, abs=1e-4)
            assert result.top1 == 1.0
            assert result.f1_full == 1.0
        truth = reference(llama, built.prompt)
        for spec in ("reuse", "blend:head_query@0.2", "blend:strided@0.3+p8"):
            settings = parse_eval_mode(spec).mode.settings
            fidelity, report = blended(llama, subject.library, built.prompt, truth, settings)
            result = by[item.id, spec]
            assert result.kl == pytest.approx(fidelity.kl, rel=1e-3, abs=1e-5)
            assert result.kl > 1e-4, "a blend that changes nothing could not be told from full prefill"
            assert (result.budget_spent, result.bytes_loaded) == (report.budget_spent, report.bytes_loaded)
            assert sum(map(len, result.selected)) == result.recomputed_tokens == len(report.selected)
        assert len(by[item.id, "full"].ttft_s) == 2
        assert set(by[item.id, "reuse"].stages_s) == {"score", "load", "rotate", "recompute", "question"}


def test_records_show_the_prompts_tokens(subject, tmp_path):
    run = start(subject, tmp_path, "full,blend:chunk_head@0.1", count=7)
    for item in items(7):
        record = run.items[item.id]
        assert ["".join(c) for c in record.chunks] == list(item.contexts[:3])
        assert [len(c) for c in record.chunks] == [len(c) for c in build(subject, item, 3).chunks]
        assert (record.dropped, record.ceiling) == (2, True)
        assert record.meta == {"topic": item.meta["topic"]}
    chosen = next(r for r in run.results if r.mode != "full").selected
    assert chosen[0] == [], "the first chunk is exact"
    assert all(offsets == list(range(len(offsets))) for offsets in chosen), "chunk_head"


def test_offsets(subject):
    prompt = build(subject, items(1)[0], 2).prompt
    system, first = (len(s.token_ids) for s in prompt.segments[:2])
    assert offsets_by_chunk(prompt, [system, system + first - 1, system + first + 4]) == [[0, first - 1], [4]]


def test_deviation_by_layer(subject, tmp_path):
    """Nothing deviates where all is recomputed; layer 0's K and V hang on the token alone."""
    run = start(subject, tmp_path)
    found = {r.mode: r.deviation for r in run.results if r.item == "qa-0"}
    assert found["full"] is None
    assert {len(v) for v in found["reuse"].values()} == {subject.layers}
    for layers in found["blend:random@1"].values():
        assert max(layers) < 1e-4
    for name in ("k", "v"):
        assert found["reuse"][name][0] < 1e-4
        assert found["reuse"][name][1] > found["blend:strided@0.3+p8"][name][1] > 1e-3
    assert min(found["reuse"]["attention"][1:]) > 1e-4
    assert found["reuse"]["attention"][0] < 1e-4
    assert all(r.deviation is None for r in run.results if r.item == "qa-1")


def test_goes_on_where_it_stopped(subject, tmp_path, monkeypatch):
    """A run that dies keeps what it wrote; the same call measures the rest, once."""
    asked = []
    ask = TorchSubject.ask

    def failing(self, built, mode, tokens):
        asked.append((built.record.item, mode.spec))
        if built.record.item == "qa-1" and len(asked) < 20:
            raise KeyboardInterrupt
        return ask(self, built, mode, tokens)

    monkeypatch.setattr(TorchSubject, "ask", failing)
    with pytest.raises(KeyboardInterrupt):
        start(subject, tmp_path, "full,reuse", count=3)
    assert [r.item for r in RunFolder(tmp_path).read().results] == ["qa-0", "qa-0"]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"item": "qa-1", "mode": "fu')  # what a crash leaves
    asked.clear()
    asked.extend([None] * 20)
    run = start(subject, tmp_path, "full,reuse", count=3)
    assert [(r.item, r.mode) for r in run.results] == [(f"qa-{i}", m) for i in range(3) for m in ("full", "reuse")]
    assert ("qa-0", "full") not in asked
    assert set(run.items) == {"qa-0", "qa-1", "qa-2"}
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    run = start(subject, tmp_path, "full,reuse,blend:strided@0.2", count=3)
    assert (tmp_path / "results.jsonl").read_text().splitlines()[: len(lines)] == lines
    assert run.modes == ["full", "reuse", "blend:strided@0.2"]


def test_another_configuration_is_refused(subject, tmp_path):
    start(subject, tmp_path, "full", count=1)
    with pytest.raises(InputError, match="other settings"):
        start(subject, tmp_path, "full", count=1, settings=EvalSettings(chunks=2))
    with pytest.raises(InputError, match="same id"):
        start(subject, tmp_path / "x", "full", given=items(1) * 2)
    with pytest.raises(InputError, match="holds no run"):
        RunFolder(tmp_path / "nothing").read()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match="not understood"):
        RunFolder(tmp_path).read()


def test_a_mode_below_its_floor_is_left_out(subject, tmp_path):
    run = start(subject, tmp_path, "full,blend:kv_deviation@0.001,reuse")
    assert run.modes == ["full", "reuse"]
    assert "spends on selecting alone" in run.meta["left_out"]["blend:kv_deviation@0.001"]
    assert len(run.results) == 4


def test_summaries_are_answers_to_rouge(subject, tmp_path):
    run = start(subject, tmp_path, "full,reuse", count=2, given=items(2, "summary"))
    for result in run.results:
        assert result.f1 is result.em is None
        assert 0.0 <= result.rouge_l <= 1.0


def test_passages_that_do_not_fit_are_dropped(subject, monkeypatch):
    long = EvalItem("long", "What?", ("x",), (TOPICS["with"] * 30,) * 3 + ("short\n\n",))
    built = build(subject, long)
    assert (len(built.chunks), built.record.dropped) == (1, 3)
    assert len(built.prompt) < subject.context
    with pytest.raises(PromptTooLongError, match="cut the passages"):
        build(subject, EvalItem("longer", "What?", ("x",), (TOPICS["with"] * 90,)))


def test_red_correctness_gives_no_speed_up(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchSubject, "budget_one", lambda self, built, truth: 0.3)
    run = start(subject, tmp_path, "full,reuse")
    assert (run.meta["correct"], run.meta["budget_one_kl"]) == (False, 0.3)
    for row in summarise(run):
        assert row["speedup"] is row["speedup_p50"] is None
        assert all("ttft" not in found for found in row["against"].values())


def test_the_summary(subject, tmp_path):
    run = start(subject, tmp_path, count=3)
    rows = {r["mode"]: r for r in write_summary(tmp_path)}
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(list(rows.values())))
    assert (tmp_path / "report.html").stat().st_size > 1000
    own = [r for r in run.results if r.mode == "reuse"]
    full = [r for r in run.results if r.mode == "full"]
    row = rows["reuse"]
    assert row["n"] == 3
    assert row["kl"] == pytest.approx(sum(r.kl for r in own) / 3)
    logs = [math.log(median_ttft(f) / median_ttft(o)) for f, o in zip(full, own, strict=True)]
    assert row["speedup"]["estimate"] == pytest.approx(math.exp(sum(logs) / 3))
    assert row["speedup"]["low"] <= row["speedup"]["estimate"] <= row["speedup"]["high"]
    assert row["against"]["blend:random@1"]["kl"]["wins"] == 3, "higher KL"
    assert row["budget_spent"] == 0
    assert rows["cacheblend@0.15"]["nominal"] == 0.15
    assert rows["cacheblend@0.15"]["selector"] == "kv_deviation"
    assert rows["cacheblend@0.15"]["budget_spent"] > 0.3, "two of three layers are computed whole"
    assert rows["full"]["stages_ms"]["score"] is None
    assert row["ceiling"] == 1.0


def test_under_poisson_load(subject, tmp_path):
    modes = parse_eval_modes("full,prefix,reuse,epic@4")
    run = start(subject, tmp_path, "full,prefix,reuse,epic@4")
    found = measure_load(Opening("torch", "tiny"), subject, run, items(2), modes, SETTINGS, 5, 200.0)
    assert list(found) == ["full", "reuse", "epic@4"]
    for row in found.values():
        assert (row["requests"], row["errors"], row["first_error"], row["rate"]) == (5, 0, None, 200.0)
        assert row["throughput"] > 0
        assert row["ttft_ms"]["p20"] <= row["ttft_ms"]["p80"]
    fails = measure_load(Opening("torch", "tiny"), subject, run, items(2), modes[:1], SETTINGS, 2, None)
    assert fails["full"]["rate"] == pytest.approx(4 / sum(t for r in run.results if r.mode == "full" for t in r.ttft_s))


def test_the_planners_predictions_are_written_down(llama_folder, tmp_path):
    with ExitStack() as opened:
        subject = Opening("torch", str(llama_folder), plan=True).subject(opened)
        run = start(subject, tmp_path, "full,reuse,blend:strided@0.2", count=3)
    for result in run.results:
        assert (result.predicted_s is None) == (result.mode == "full")
    rows = {r["mode"]: r for r in summarise(run)}
    assert rows["full"]["prediction_error"] is None
    assert rows["reuse"]["prediction_error"] >= 0.0


def test_settings_are_checked():
    for wrong in ({"chunks": 0}, {"repeats": 0}, {"deviation_items": -1}):
        with pytest.raises(InputError, match="at least"):
            EvalSettings(**wrong)
    with pytest.raises(InputError, match="unknown engine"), ExitStack() as opened:
        Opening("tensorrt", "demo").subject(opened)
    with pytest.raises(InputError, match="planner is the embedded engine's"), ExitStack() as opened:
        Opening("vllm", "demo", plan=True).subject(opened)


def test_red_is_well_above_rounding():
    assert 0.003 < run_module.RED < 1.0


@pytest.mark.parametrize("recipe", ["system", "bos"])
def test_prefix_is_exact_whatever_the_recipe(llama, tmp_path, recipe):
    """Chunks computed behind BOS are no part of the prompt's prefix: only the system prefix is held then."""
    subject = TorchSubject(llama, KVStore.open(None, memory_bytes=1 << 30), recipe, SYSTEM)
    try:
        run = start(subject, tmp_path, "full,prefix,reuse", count=1)
    finally:
        subject.close()
    found = {r.mode: r for r in run.results}
    assert found["prefix"].kl == pytest.approx(0, abs=1e-4)
    assert found["prefix"].answer == found["full"].answer
    assert found["reuse"].kl > 1e-4
