"""The choice of a codec: its file, and when it is the default of a new store."""

from __future__ import annotations

import json

import pytest
from verdicts import verdict

from blendkv.blend.codec_choice import (
    CodecChoice,
    CodecEvidence,
    choice_path,
    default_codec,
    read_choice,
    write_choice,
)
from blendkv.blend.gate import Gate, read_verdict, write_verdict
from blendkv.errors import InputError

MODE = "blend:strided@0.3"


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def choice(codec):
    rows = (
        CodecEvidence("int8", 0.53, 32, 0.03, 0.0, 0.001, True),
        CodecEvidence("turbo4", 0.28, 32, 0.05, 0.02, 0.03, False, "too much"),
    )
    return CodecChoice(codec, MODE, 0.005, 0.95, rows, 0.001, "codec", "tiny", "float32", "torch", "2026-01-02", {})


def judged(codec, *modes):
    return verdict(*modes, data={"codec": codec})


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_what_is_written_is_read(tmp_path, codec):
    path = write_choice(tmp_path, "f00", choice(codec))
    assert path == choice_path(tmp_path, "f00") == tmp_path / "gate" / "codecs" / "f00.json"
    assert read_choice(tmp_path, "f00") == choice(codec)
    assert read_choice(tmp_path, "f01") is read_choice(None, "f00") is None


def test_a_choice_counts_with_a_verdict_that_passed_that_codec(tmp_path, user_folder):
    assert default_codec(tmp_path / "s", "f00") == "raw"
    write_choice(user_folder, "f00", choice("int8"))
    assert default_codec(None, "f00") == "raw", "no verdict"
    write_verdict(user_folder, "f00", judged("raw", MODE))
    assert default_codec(None, "f00") == "raw", "raw's verdict says nothing of int8"
    write_verdict(user_folder, "f00", judged("int8"))
    assert default_codec(None, "f00") == "raw", "int8 failed"
    write_verdict(user_folder, "f00", judged("int8", MODE))
    assert default_codec(None, "f00") == default_codec(tmp_path / "s", "f00") == "int8"
    assert default_codec(None, "f01") == "raw", "another model"
    write_choice(tmp_path / "s", "f00", choice("raw"))
    assert default_codec(tmp_path / "s", "f00") == "raw", "a store's own choice goes first"


def test_verdicts_of_several_codecs_stand_side_by_side(tmp_path):
    write_verdict(tmp_path, "f00", judged("raw", MODE))
    write_verdict(tmp_path, "f00", judged("int8"))
    assert {p.name for p in (tmp_path / "gate").iterdir()} == {"f00.json", "f00.int8.json"}
    states = [Gate.read(tmp_path, "f00", "m", codec=c).state for c in ("raw", "int8", "turbo2")]
    assert states == ["passed", "failed", "not_measured"]


def test_a_verdict_of_one_file_per_model_is_still_read(tmp_path, user_folder):
    """Before there was a file per codec, the codec was said only inside."""
    made = write_verdict(tmp_path, "f00", judged("int8", MODE))
    made.rename(made.with_name("f00.json"))
    assert read_verdict(tmp_path, "f00", "int8").passed
    assert read_verdict(tmp_path, "f00") is None
    write_verdict(user_folder, "f00", judged("raw", MODE))
    assert read_verdict(tmp_path, "f00").codec == "raw", "the user's, as the store has none of this codec"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": 2}', "null"]
    + [
        json.dumps({"format": 1, **fields})
        for fields in ({}, {"codec": "zip", "mode": "", "margin": 1, "confidence": 1, "rows": []},
                       {"codec": "int8", "mode": "", "margin": 1, "confidence": 1, "rows": []})
    ],
)  # fmt: skip
def test_a_damaged_choice_is_an_error(tmp_path, text):
    path = choice_path(tmp_path, "f00")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(InputError, match=r"no choice of a codec of format 1 .* blendkv calibrate --codec auto"):
        default_codec(tmp_path, "f00")
