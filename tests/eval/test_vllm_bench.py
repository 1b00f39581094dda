"""What the benchmarks inside vLLM do outside of it: settings, draws, verdicts, rows, and the process that measures."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendkv.blend import BlendSummary
from blendkv.errors import BlendKVError, InputError
from blendkv.eval.bench.flops import FlopModel
from blendkv.eval.bench.process import MeasuringProcess, engine_environment
from blendkv.eval.bench.serve import ServeSettings, draw
from blendkv.eval.bench.ttft import real_chunks
from blendkv.eval.bench.vllm_ttft import ConnectorCost, Oracles, VllmTtftResult, VllmTtftSettings, run_vllm_ttft

SERVER = """
import os, sys
from blendkv.errors import InputError
from blendkv.eval.bench.process import serve_operations

def double(values):
    print("noise on standard output")
    return [2 * v for v in values]

def refuse(kind):
    raise InputError("not that") if kind == "input" else ValueError("broken")

def die():
    sys.stderr.write("last words")
    sys.stderr.flush()
    os._exit(7)

serve_operations({"double": double, "refuse": refuse, "die": die, "environment": lambda name: os.environ.get(name)})
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    (tmp_path / "measured_thing.py").write_text(SERVER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with MeasuringProcess("measured_thing", {"BLENDKV_TEST_VALUE": "5"}) as made:
        yield made


def test_calls_cross_the_process_border(process):
    assert process.call("double", values=[1, 2]) == [2, 4]
    assert process.call("environment", name="BLENDKV_TEST_VALUE") == "5"
    assert "BLENDKV_TEST_VALUE" not in os.environ
    with pytest.raises(InputError, match=r"^not that$"):
        process.call("refuse", kind="input")
    with pytest.raises(BlendKVError, match="ValueError: broken") as other:
        process.call("refuse", kind="other")
    assert not isinstance(other.value, InputError)
    assert process.call("double", values=[3]) == [6]


def test_a_process_that_dies_is_an_error_with_its_last_words(process):
    with pytest.raises(BlendKVError, match=r"ended with 7 while it ran 'die'.*last words"):
        process.call("die")
    with pytest.raises(BlendKVError, match="ended with 7"):
        process.call("double", values=[1])


def test_an_engine_that_cannot_start_is_an_error(tmp_path):
    with (
        MeasuringProcess("blendkv.eval.bench.no_such_module", {}) as made,
        pytest.raises(BlendKVError, match="No module"),
    ):
        made.call("start")


def test_environment_of_an_engine():
    found = engine_environment(3, (2 << 30) + 1)
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_KVCACHE_SPACE"]) == ("3", "3")


GREEN = {"noise": 0.001, "budget_one": 0.002, "own_place": 0.003, "garbage": 2.0, "red": 0.05}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"budget_one": 0.06}, "budget 1 differs"),
        ({"budget_one": float("nan")}, "budget 1 differs"),
        ({"own_place": 0.06}, "own place differs"),
        ({"garbage": 0.04}, "garbage KV goes unnoticed"),
        ({"garbage": float("nan")}, "garbage KV goes unnoticed"),
    ],
)
def test_verdicts(change, says):
    failures = Oracles(**{**GREEN, **change}).failures
    assert len(failures) == (says is not None)
    assert all(says in line for line in failures)
    assert VllmTtftResult(oracles=[Oracles(**GREEN), Oracles(**{**GREEN, **change})]).failures == failures


def test_the_connectors_cost_is_a_ratio_per_round():
    cost = ConnectorCost(100, "miss", [(1.0, 0.5), (2.0, 0.6), (3.3, 0.7)], [(1.0, 0.5), (1.0, 0.5), (3.0, 0.7)])
    row = json.loads(json.dumps(cost.row()))
    assert row["ratio"] == {"p20": pytest.approx(1.04), "p50": pytest.approx(1.1), "p80": pytest.approx(1.64)}
    assert row["cpu_ratio"]["p50"] == 1.0
    assert (row["rounds"], row["ttft_ms"]["p50"], row["without_ms"]["p50"]) == (3, 2000.0, 1000.0)


def test_scheduler_times():
    assert VllmTtftResult().scheduler_ms is None
    assert VllmTtftResult(scheduling=[1e-5, 2e-5, 5e-4]).scheduler_ms == {"p50": 0.02, "max": 0.5}


@given(st.integers(1, 20), st.integers(1, 5), st.floats(0, 3), st.integers(0, 9))
def test_requests_are_drawn_without_repetition_and_the_same_for_a_seed(documents, chunks, zipf, seed):
    settings = ServeSettings(requests=5, documents=documents, chunks=min(chunks, documents), zipf=zipf, seed=seed)
    drawn = draw(settings)
    assert drawn == draw(settings)
    assert len(drawn) == 5
    for request in drawn:
        assert len(set(request)) == len(request) == settings.chunks
        assert set(request) <= set(range(documents))


def test_zipf_prefers_the_first_and_order_is_shuffled():
    drawn = draw(ServeSettings(requests=400, documents=20, chunks=3, zipf=1.5))
    counts = np.bincount(np.concatenate(drawn), minlength=20)
    assert counts[0] > 3 * counts[10:].mean()
    assert 50 < sum(request[0] == 0 for request in drawn) < counts[0] / 2 + 50


@pytest.mark.parametrize(
    ("settings", "values", "says"),
    [
        (VllmTtftSettings, {"repeats": 0}, "repeats is 0"),
        (VllmTtftSettings, {"tokens": ()}, "name at least one"),
        (VllmTtftSettings, {"tokens": (300,)}, "less than a chunk of 400"),
        (VllmTtftSettings, {"modes": ("x",)}, "unknown mode"),
        (ServeSettings, {"clients": 0}, "clients is 0"),
        (ServeSettings, {"chunks": 65}, "at most the 64 documents"),
        (ServeSettings, {"zipf": -1.0}, "zipf is -1"),
        (ServeSettings, {"zipf": float("nan")}, "zipf is nan"),
        (ServeSettings, {"modes": ()}, "name at least one"),
        (ServeSettings, {"modes": ("blend:x",)}, "unknown selector"),
    ],
)
def test_wrong_settings(settings, values, says):
    with pytest.raises(InputError, match=says):
        settings(**values)


def test_a_model_that_does_not_exist_is_said_before_an_engine_starts(monkeypatch):
    monkeypatch.setattr("blendkv.eval.bench.vllm_ttft.MeasuringProcess", lambda *a: pytest.fail("started"))
    with pytest.raises(InputError, match="no model folder"):
        run_vllm_ttft("./nowhere", "auto", VllmTtftSettings())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ttft", "--engine", "jax"], "unknown engine 'jax'; allowed: torch, vllm"),
        (["ttft", "--engine", "vllm", "--tokens", "2k"], "tokens is '2k'"),
        (["ttft", "--engine", "vllm", "--tokens", ""], "name at least one"),
        (["serve", "--clients", "0"], "clients is 0"),
    ],
)
def test_the_command_line_refuses(arguments, says, capsys, own_logging, monkeypatch):
    from blendkv.cli.main import main

    monkeypatch.setattr("blendkv.cli.bench_vllm._need_vllm", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_vllm_not_installed(capsys, own_logging, monkeypatch):
    from blendkv.cli.main import main

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in (["ttft", "--engine", "vllm"], ["serve"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *command])
        assert ended.value.code == 2
        assert "vLLM is not installed; run: pip install" in capsys.readouterr().err


def test_several_runs_of_a_topic(llama):
    one = real_chunks(llama.tokenizer, 3, 50)
    many = real_chunks(llama.tokenizer, 3, 50, each=None)
    assert one[0].tolist() == many[0].tolist()
    assert one[1].tolist() != many[1].tolist()
    assert {len(run) for run in one + many} == {50}
    with pytest.raises(InputError, match="fewer or smaller"):
        real_chunks(llama.tokenizer, 10**7, 50, each=None)


def test_flops_of_a_summary_are_near_those_of_the_report(llama):
    summary = BlendSummary("strided", "js", 0.1, 0.1, 1000, 900, 0, 50, 90, 0, 0, {})
    model = FlopModel.counted(llama.runner)
    expected = 140 * model.per_row + model.attention(positions(950, 90)) + model.attention(positions(1000, 50, 950))
    assert model.blend(summary) == pytest.approx(expected, rel=0.01)


def positions(stop, count, start=0):
    return torch.from_numpy(np.linspace(start, stop - 1, count)).long()
