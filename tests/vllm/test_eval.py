"""vLLM under the evaluation: the same modes, figures of the same size as the embedded engine's on the same model."""

from __future__ import annotations

import json

import pytest
import torch
import vllm_engine  # noqa: F401  vLLM, or a skip
from tiny_hub import SYSTEM, TOPICS, save_model

from blendkv.cli.main import main
from blendkv.engines.torch.engine import TorchEngine
from blendkv.eval.items import EvalItem, RunFolder
from blendkv.eval.modes import parse_eval_modes
from blendkv.eval.run import EvalSettings, describe, run_eval
from blendkv.eval.subject_torch import TorchSubject
from blendkv.eval.subject_vllm import VllmSubject
from blendkv.store.tiered import KVStore

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]

MODES = "full,prefix,reuse,blend:head_query@0.2,blend:random@1,cacheblend@0.15,blend:kv_deviation@0.001"
SETTINGS = EvalSettings(chunks=3, repeats=1, deviation_items=1)
ITEMS = [
    EvalItem(
        f"item-{i}", f"What of {name}?", (TOPICS[name].split(".")[0],),
        tuple(f"{text}\n\n" for text in list(TOPICS.values())[i : i + 3]), max_new_tokens=20,
    )
    for i, name in enumerate(list(TOPICS)[:2])
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "llama", head_dim=32, hidden_size=128)


def results(subject, folder):
    modes = parse_eval_modes(MODES)
    meta = describe(subject, SETTINGS, "topics", None, torch.get_num_threads())
    run = run_eval(subject, ITEMS, modes, SETTINGS, RunFolder(folder), meta)
    return run, {(r.item, r.mode): r for r in run.results}


def test_vllm_and_transformers_agree(model, tmp_path):
    embedded = TorchSubject(TorchEngine.load(str(model)), KVStore.open(None, memory_bytes=1 << 28), system=SYSTEM)
    _, expected = results(embedded, tmp_path / "torch")
    subject = VllmSubject(str(model), tmp_path / "store", max_model_len=1024, system=SYSTEM)
    try:
        run, found = results(subject, tmp_path / "vllm")
    finally:
        subject.close()
    assert run.meta["correct"] is True
    assert run.meta["budget_one_kl"] < 1e-4, "float32"
    assert list(run.meta["left_out"]) == ["blend:kv_deviation@0.001"]
    assert (subject.fingerprint, subject.dtype, subject.layers) == (
        embedded.fingerprint, embedded.dtype, embedded.layers,
    )  # fmt: skip
    assert set(found) == set(expected)
    for key, theirs in expected.items():
        mine = found[key]
        assert mine.kl == pytest.approx(theirs.kl, rel=0.2, abs=1e-3), key
        assert mine.prompt_tokens == theirs.prompt_tokens
        assert len(mine.ttft_s) == 1
        if theirs.budget_spent is None:
            assert mine.answer == theirs.answer
            assert mine.budget_spent is None
        else:
            assert mine.budget_spent == pytest.approx(theirs.budget_spent, abs=1e-6)
            assert (mine.reusable_tokens, mine.selector) == (theirs.reusable_tokens, theirs.selector)
            assert set(mine.stages_s) == set(theirs.stages_s)
    assert found["item-0", "reuse"].kl > 0.01, "the blend changes nothing: this test could not fail"


def test_the_command(model, tmp_path, capsys):
    """Generated items, a whole run on vLLM, and the same load on an engine of its own."""
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "eval", "run", "--data", "lookup", "--format", "synth", "--engine", "vllm", "--model", str(model),
                "--modes", "full,reuse", "--limit", "1", "--chunks", "2", "--repeats", "1",
                "--out", str(tmp_path / "r"), "--load-requests", "2", "--load-rate", "50", "--json",
            ]
        )  # fmt: skip
    assert not ended.value.code
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["mode"], r["engine"], r["n"]) for r in rows] == [("full", "vllm", 1), ("reuse", "vllm", 1)]
    assert [(r["load"]["requests"], r["load"]["errors"]) for r in rows] == [(2, 0), (2, 0)]
    assert (tmp_path / "r" / "report.html").is_file()
