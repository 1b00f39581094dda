"""The gate: verdict files, and what a verdict means for a mode."""

from __future__ import annotations

import json
import os

import pytest
from verdicts import put_verdict, verdict

from blendkv.blend import parse_mode
from blendkv.blend.gate import DEFAULT_MODE, Gate, Target, read_verdict, verdict_path, write_verdict
from blendkv.errors import GateError, InputError

PASSED = ("blend:strided@0.03", "blend:head_query@0.1")


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("modes", [PASSED, ()])
def test_what_is_written_is_read(tmp_path, modes):
    made = verdict(*modes)
    path = write_verdict(tmp_path / "s", "f00", made)
    assert path == tmp_path / "s" / "gate" / "f00.json"
    assert read_verdict(tmp_path / "s", "f00") == made
    assert read_verdict(tmp_path / "s", "other") is None
    assert [p.name for p in path.parent.iterdir()] == ["f00.json"], "nothing temporary is left"
    assert json.loads(path.read_text())["format"] == 2


def test_the_store_s_own_goes_before_the_user_s(tmp_path, user_folder):
    assert read_verdict(tmp_path / "s", "f00") is None
    put_verdict(user_folder, "f00", *PASSED)
    assert read_verdict(tmp_path / "s", "f00").passed
    assert read_verdict(None, "f00").passed
    put_verdict(tmp_path / "s", "f00")
    assert not read_verdict(tmp_path / "s", "f00").passed
    assert read_verdict(None, "f00").passed


def test_a_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    put_verdict(tmp_path, "f00", *PASSED)

    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"cannot be written to .*No space left"):
            put_verdict(tmp_path, "f00")
    assert read_verdict(tmp_path, "f00").passed
    assert len(list((tmp_path / "gate").iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 1}, "format 1"),
        ({"format": None}, "format None"),
        ({"passed": "yes"}, "passed 'yes'"),
        ({"passed": False}, "one implies the other"),
        ({"modes": []}, "one implies the other"),
        ({"mode": "reuse"}, "none of its modes"),
        ({"mode": None}, "none of its modes"),
        ({"modes": ["blend:gone@0.1"], "mode": "blend:gone@0.1"}, "unknown selector 'gone'"),
        ({"target": {"kl": -1, "f1": 0.01, "confidence": 0.95}}, "KL is -1"),
        ({"evidence": [{"mode": "reuse"}]}, "missing"),
    ],
)
def test_a_file_that_is_no_verdict(tmp_path, change, why):
    path = put_verdict(tmp_path, "f00", *PASSED)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=r"holds no gate verdict of format 2") as caught:
        read_verdict(tmp_path, "f00")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"passed"', '{"format": 2}'])
def test_a_damaged_file(tmp_path, text):
    path = verdict_path(tmp_path, "f00")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(InputError, match=r"remove it, or measure the model again"):
        read_verdict(tmp_path, "f00")


@pytest.mark.parametrize(
    "wrong", [{"kl": 0}, {"kl": float("nan")}, {"f1": -0.1}, {"confidence": 1}, {"confidence": 0.1}]
)
def test_targets_out_of_range(wrong):
    with pytest.raises(InputError, match=r"allowed"):
        Target(**wrong)


TABLE = {  # verdict, required: (the state, what and why a mode is refused)
    ("none", False): ("not_measured", {"blend:strided@0.03": None, "blend:strided@0.02": None, "reuse": None}),
    ("none", True): ("not_measured", dict.fromkeys(("blend:strided@0.03", "reuse"), "run blendkv calibrate --model m")),
    ("failed", False): ("failed", dict.fromkeys(("blend:strided@0.03", "reuse"), "did not pass this model: KL 0.9")),
    ("failed", True): ("failed", dict.fromkeys(("blend:strided@0.03", "reuse"), "did not pass this model: KL 0.9")),
    ("passed", False): ("passed", {"blend:strided@0.03": None, "blend:strided@0.02": None, "reuse": None}),
    ("passed", True): ("passed", {
        "blend:strided@0.03": None, "blend:strided": None, "blend:head_query@0.10": None,
        "blend:strided@0.02": "did not pass blend:strided@0.02; it passed blend:strided@0.03, blend:head_query@0.1",
        "blend:strided@0.03-shift": "did not pass", "reuse": "did not pass reuse",
    }),
}  # fmt: skip


@pytest.mark.parametrize(("found", "required"), TABLE)
def test_what_is_allowed(found, required):
    state, expected = TABLE[found, required]
    made = {"none": None, "failed": verdict(), "passed": verdict(*PASSED)}[found]
    gate = Gate(made, required, "blendkv calibrate --model m")
    assert gate.state == state
    assert gate.check(parse_mode("full")) is None
    gate.demand(parse_mode("full"))
    for spec, why in expected.items():
        told = gate.check(parse_mode(spec))
        if why is None:
            assert told is None
            gate.demand(parse_mode(spec))
            continue
        assert why in told
        assert "quality gate" in told
        if required:
            with pytest.raises(GateError, match=r"blendkv calibrate --model m|name one of these"):
                gate.demand(parse_mode(spec))
        else:
            gate.demand(parse_mode(spec))  # it is prefilled in full instead
    assert (gate.closed is None) == (found == "passed" or (found == "none" and not required))


def test_the_mode_that_is_meant():
    assert str(Gate().mode(None)) == DEFAULT_MODE
    assert str(Gate(verdict()).mode(None)) == DEFAULT_MODE
    assert str(Gate(verdict(*PASSED)).mode(None)) == PASSED[0]
    assert str(Gate(verdict(*PASSED)).mode("reuse")) == "reuse"
    with pytest.raises(InputError, match=r"unknown mode"):
        Gate().mode("bogus")


def test_the_command_that_measures(tmp_path):
    put_verdict(tmp_path / "s", "f00", *PASSED)
    gate = Gate.read(tmp_path / "s", "f00", "demo", required=True)
    assert gate.measure == f"blendkv calibrate --model demo --store {tmp_path}/s"
    assert gate.state == "passed"
    assert Gate.read(None, "f00", "demo").measure == "blendkv calibrate --model demo"
