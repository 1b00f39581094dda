"""Codec rows of `bench store`: what they hold, and the rates that a wrong codec does not get."""

from __future__ import annotations

import json

import pytest
import torch

from blendkv.errors import InputError
from blendkv.eval.bench.codecs import EXPECTED, CodecSettings, codec_rows
from blendkv.store import CODECS
from blendkv.store.codecs import TurboCodec

SMALL = CodecSettings(shapes=("smollm2-135m",), tokens=60, rounds=1, nbytes=1 << 17)
SHAPE = "smollm2-135m"


def by_name(rows):
    assert all(set(row) == {"name", "value", "unit", "baseline", "ratio"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    return {row["name"]: row for row in rows}


def test_rows():
    threads = torch.get_num_threads()
    rows = by_name(codec_rows(SMALL))
    assert torch.get_num_threads() == threads
    json.dumps(list(rows.values()))
    assert set(EXPECTED) == set(CODECS.names())
    assert rows[f"copy, {SHAPE}"]["value"] > 0
    for name in CODECS.names():
        size = rows[f"{name} bytes, {SHAPE}"]
        assert size["value"] == 3 * 2 * CODECS.get(name).vector_bytes(64, 2)
        assert size["ratio"] == pytest.approx(size["value"] / 768)
        assert rows[f"{name} error, {SHAPE}"]["value"] == pytest.approx(EXPECTED[name], rel=0.15)
        for what in ("encode", "decode") if name != "raw" else ():
            rate = rows[f"{name} {what}, {SHAPE}"]
            assert (rate["unit"], rate["baseline"]) == ("GB/s", "copy")
            assert rate["value"] > 0
            assert rate["ratio"] == pytest.approx(rate["value"] / rows[f"copy, {SHAPE}"]["value"])


@pytest.mark.parametrize("fault", [lambda t: t * 1.3, lambda t: t.half(), lambda t: t.double(), lambda t: t[:, :1]])
def test_a_wrong_round_trip_gets_no_rates(monkeypatch, fault):
    right = TurboCodec.decode
    monkeypatch.setattr(TurboCodec, "decode", lambda *args: tuple(fault(t) for t in right(*args)))
    rows = by_name(codec_rows(SMALL))
    for name in CODECS.names():
        if name != "raw":
            rate = rows[f"{name} decode, {SHAPE}"]
            wrong = name.startswith("turbo")
            assert (rate["value"] is None, rate["ratio"] is None) == (wrong, wrong)


def test_wrong_settings():
    with pytest.raises(InputError, match="unknown shape 'gpt-9'; allowed: smollm2-135m, llama-8b"):
        CodecSettings(shapes=("gpt-9",))
    with pytest.raises(InputError, match="rounds is 0; at least 1"):
        CodecSettings(rounds=0)
