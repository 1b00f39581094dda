"""`bench kernels`: its rows, the ratio that a wrong backend does not get, and the counted work."""

import json

import pytest
from typer.testing import CliRunner

from blendkv.cli.main import app
from blendkv.errors import InputError
from blendkv.eval.bench import kernels
from blendkv.eval.bench.kernels import Baseline, Contest, KernelSettings, run_kernels, usable
from blendkv.kernels import dispatch
from blendkv.kernels.attention import torch as tiles
from blendkv.kernels.testing import Error

ROWS = {
    "op", "backend", "shape", "dtype", "time_us", "gflops", "gbps", "baseline", "ratio", "error", "red", "extra_bytes",
    "baseline_extra_bytes",
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Little memory, the torch backend alone, small chunks."""
    monkeypatch.setattr(kernels, "BEYOND_CACHES", 1 << 20)
    monkeypatch.setattr(kernels, "CHUNK", 64)
    monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": ("torch",), "other": ("torch",)})


def test_rows(small):
    lines = []
    rows = run_kernels(KernelSettings(shapes=("smollm2-135m",), sizes=(128,), repeats=1), lines.append)
    assert {r["op"] for r in rows} == {"attention", "mass", "scatter", "deviation"}
    assert all(set(r) == ROWS for r in rows)
    assert all(r["ratio"] > 0 and not r["red"] and r["backend"] == "torch" for r in rows)
    assert [r["baseline"] for r in rows if r["op"] == "attention"] == [
        "sdpa, boolean mask (time)",
        "sdpa, dense causal, 128 (rate)",
    ]
    assert all((r["gflops"] is None) != (r["gbps"] is None) for r in rows)
    assert len(lines) == 10  # attention, mass, three codecs of 64 and of 128 tokens, two raw chunks, deviation
    json.dumps(rows)


def test_a_wrong_backend_gets_no_ratio(small, monkeypatch):
    right = tiles.run
    monkeypatch.setattr(tiles, "run", lambda *a, **k: _off(right(*a, **k)))
    dispatch._module.cache_clear()
    result = CliRunner().invoke(
        app, ["bench", "kernels", "--shapes", "smollm2-135m", "--tokens", "128", "--repeats", "1", "--json"]
    )
    assert result.exit_code == 1
    by_op = {r["op"]: r for r in json.loads(result.stdout)["rows"]}
    assert by_op["attention"]["red"]
    assert by_op["attention"]["ratio"] is None
    assert by_op["scatter"]["ratio"] > 0


def _off(output):
    output.out.mul_(1.1)
    return output


def test_work_and_ratios_by_hand(monkeypatch):
    """A contest of 2e9 FLOPs in 1 ms against the same work in 3 ms, and against 1e9 in 2 ms."""
    seconds = {"torch": 1e-3, "= same": 3e-3, "= half": 2e-3}
    monkeypatch.setattr(
        kernels, "_times", lambda calls, *_: {n: dict.fromkeys(("p20", "p50", "p80"), seconds[n] * 1e6) for n in calls}
    )
    monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": ("torch",), "other": ("torch",)})
    fine = {"out": Error(0.0, 0.0, 1.0)}
    bases = (Baseline("same", lambda: None, "time"), Baseline("half", lambda: None, "rate", 1e9))
    contest = Contest("attention", "by hand", lambda: None, bases, lambda backend: fine, flops=2e9)
    rows = kernels._measure(contest, KernelSettings(), lambda line: None)
    assert [r["ratio"] for r in rows] == pytest.approx([3.0, 4.0])
    assert rows[0]["gflops"] == pytest.approx(2000)


def test_settings_are_checked():
    with pytest.raises(InputError, match="unknown shape 'gpt'; allowed: smollm2-135m, llama-8b, llama-70b"):
        KernelSettings(shapes=("gpt",))
    with pytest.raises(InputError, match="a size is 10 tokens; at least 64 are allowed"):
        KernelSettings(sizes=(10,))
    with pytest.raises(InputError, match="selected is 0; above 0 to 1 is allowed"):
        KernelSettings(selected=0)
    with pytest.raises(InputError, match="repeats and threads must be 1 or more"):
        KernelSettings(threads=0)


def test_every_op_has_a_usable_backend():
    assert all(usable(op, "cpu") for op in dispatch.IMPLEMENTED)
    assert "reference" not in usable("attention", "cpu")
