"""The gate on the real small model: a close blend passes, and one whose stored keys are rotated wrongly is refused."""

from __future__ import annotations

import pytest
from homes import own_home
from tiny_hub import TOPICS, open_pipeline, write_corpus

from blendkv.blend.gate import Target, write_verdict
from blendkv.blend.rotation import RopeTables
from blendkv.engines.base import GenerationOptions
from blendkv.eval.calibrate import LEAST_ITEMS, calibrate
from blendkv.eval.items import EvalItem
from blendkv.eval.subject_torch import TorchSubject
from blendkv.store.tiered import KVStore

pytestmark = pytest.mark.xdist_group("real")
MODE = "blend:head_query@0.8"


def one_too_far(runner, positions):
    """Keys are moved by one position more than the model would."""
    return RopeTables(runner, positions + 1)


def not_at_all(runner, positions):
    return RopeTables(runner, positions * 0)


@pytest.mark.parametrize("rotation", [RopeTables, one_too_far, not_at_all], ids=["right", "one_too_far", "not_at_all"])
def test_a_broken_rotation_is_refused(engine32, tmp_path, monkeypatch, rotation):
    monkeypatch.setenv("BLENDKV_HOME", str(own_home(tmp_path / "home")))
    monkeypatch.setattr("blendkv.blend.context.RopeTables", rotation)
    plain = [text * 3 for text in TOPICS.values() if text.isascii()]
    items = [
        EvalItem(str(n), question, ("function",), (*plain[n % 3 : n % 3 + 3],), max_new_tokens=4)
        for n, question in enumerate(["What is a function?", "Say what ends first."] * (LEAST_ITEMS // 2))
    ]
    subject = TorchSubject(engine32, KVStore.open(None, memory_bytes=2 << 30))
    # F1 is left aside: so few items show nothing about it.
    verdict = calibrate(subject, items, target=Target(f1=1.0), candidates=[MODE])
    subject.close()
    print(verdict.summary)
    assert verdict.passed == (rotation is RopeTables)
    assert verdict.passed or verdict.summary.startswith("blending this model is broken: ")

    with open_pipeline(tmp_path / "s", engine32) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "corpus", ["lambda"])])
    write_verdict(tmp_path / "s", engine32.fingerprint, verdict)
    with open_pipeline(tmp_path / "s", engine32) as pipeline:
        asked = [pipeline.ask("What is lambda?", mode=m, options=GenerationOptions(max_new_tokens=2))
                 for m in (None, "reuse", MODE)]  # fmt: skip
        if verdict.passed:
            assert [a.mode for a in asked] == [MODE, "reuse", MODE]
        else:
            assert {a.mode for a in asked} == {"full"}
            assert pipeline.fallbacks == {"gate": 3}
