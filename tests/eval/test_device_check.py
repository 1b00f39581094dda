"""The device check where there is no GPU: it says so, and what it would measure there runs here on small sizes."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from scripted_cuda import CudaError, ScriptedCudart

from blendkv.errors import BlendKVError
from blendkv.eval.bench import device, device_blend, device_kernels, device_memory

TINY = {
    **device_blend.LLAMA_8B, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "num_hidden_layers": 2,
}  # fmt: skip
PLAN = device_kernels.Plan("cpu", ("llama-8b",), (192,), (0.1,), 64, repeats=1)


@pytest.mark.xdist_group("cuda-build")
def test_without_a_gpu_it_says_that_nothing_was_measured(tmp_path):
    root = Path(device.__file__).resolve().parents[2]
    done = subprocess.run(
        ["make", "-s", "-C", root, "device-check"], capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no GPU: nothing was measured" in done.stdout
    assert "cuda, emulated numerics: green" in done.stdout
    report = json.loads((tmp_path / "device.json").read_text())
    assert report["rows"] == []
    assert report["red"] is False


def test_what_it_measures_runs():
    with torch.inference_mode():
        copied = device_kernels.copy_rate(PLAN)
        rows = [
            *device_kernels.attention_rows(PLAN, ["torch"]),
            *device_kernels.mass_rows(PLAN, ["torch"], copied),
            *device_kernels.scatter_rows(PLAN, ["torch"], copied),
        ]
    assert {r["what"].split()[0] for r in rows} == {"attention", "mass", "scatter", "deviation,"}
    for row in rows:
        assert row["ratio"] > 0
        assert row["ours"] in device.line(row)


def test_pinned_memory_against_ordinary_memory():
    memory, cudart = device_memory.MemoryPlan(1 << 20, 1 << 18), ScriptedCudart()
    (row,) = device_memory.memory_rows(PLAN, memory, cudart)
    assert [name for name, _ in cudart.calls] == ["register", "unregister"]
    assert row["ratio"] == pytest.approx(row["rate"] / row["their_rate"])
    assert "pinned" in device.line(row)
    with pytest.raises(BlendKVError, match="the arena was not registered"):
        list(device_memory.memory_rows(PLAN, memory, ScriptedCudart(CudaError.not_supported)))


def test_the_blends_check_tells_right_from_wrong():
    found = device_blend.check_blend(TINY, "cpu", torch.float32, 192)
    assert found["budget 1"] < 1e-5
    assert found["budget 0"] > 0.1


def test_blends_against_full_prefill():
    plan = device_blend.BlendPlan(TINY, (192,), chunk=32)
    with torch.inference_mode():
        rows = list(device_blend.blend_rows(PLAN, plan, ["torch"], torch.float32))
    assert [r["recomputed"] for r in rows] == [3, 6, 3, 6]  # of 128 tokens in chunks
    assert all("x faster than full prefill" in device.line(r) for r in rows)


def test_a_failing_part_makes_the_check_red_and_ends_alone(capsys):
    check = device.Check()
    check.note("cuda numerics: green")
    assert not check.red

    def rows():
        yield {"what": "a", "ours": "cuda", "ms": 1.0}
        raise BlendKVError("a launch failed")

    check.measure("attention", rows())
    assert check.red
    assert len(check.rows) == 1
    assert "attention: FAILED, a launch failed" in capsys.readouterr().out


def test_time_is_limited(monkeypatch):
    check = device.Check()
    monkeypatch.setattr(device, "LIMIT", -1.0)
    check.measure("mass", iter([{"what": "a", "ours": "cuda", "ms": 1.0}] * 3))
    assert len(check.rows) == 1
    assert check.late("blend")
    assert not check.red
