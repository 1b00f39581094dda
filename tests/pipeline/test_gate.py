"""What the gate's verdict does to a pipeline's answers."""

from __future__ import annotations

import logging

import pytest
from homes import own_home
from tiny_hub import BagEmbedder, open_pipeline, write_corpus
from verdicts import put_verdict

from blendkv.engines.base import GenerationOptions
from blendkv.errors import GateError, InputError
from blendkv.pipeline import RagPipeline

SHORT = GenerationOptions(max_new_tokens=4)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("BLENDKV_HOME", str(own_home(tmp_path / "home")))
    monkeypatch.setattr("blendkv.pipeline.SentenceEmbedder", lambda name: BagEmbedder())


@pytest.fixture
def store(llama, tmp_path):
    with open_pipeline(tmp_path / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "corpus")], chunk_tokens=48)
    return tmp_path / "s"


def test_a_failed_verdict_turns_blending_off(store, llama, caplog):
    with open_pipeline(store, llama) as pipeline:
        truth = pipeline.ask("What is lambda?", mode="full", options=SHORT)
        assert pipeline.ask("What is lambda?", options=SHORT).mode == "blend:head_query@0.05"
    put_verdict(store, llama.fingerprint)
    with open_pipeline(store, llama) as pipeline, caplog.at_level(logging.WARNING, "blendkv.pipeline"):
        for mode in (None, "reuse", "blend:strided@0.5"):
            answer = pipeline.ask("What is lambda?", mode=mode, options=SHORT)
            assert (answer.mode, answer.blend_report) == ("full", None)
            assert answer.fallback == "the quality gate did not pass this model: KL 0.9, allowed 0.05"
            assert answer.token_ids == truth.token_ids
        assert pipeline.ask("What is lambda?", mode="full", options=SHORT).fallback is None
        assert pipeline.fallbacks == {"gate": 3}
    assert len([r for r in caplog.records if "quality gate" in r.getMessage()]) == 1


def test_chats_are_gated_too(store, llama):
    put_verdict(store, llama.fingerprint)
    with open_pipeline(store, llama) as pipeline:
        chat = pipeline.chat()
        answers = [chat.ask(question, SHORT) for question in ("What is lambda?", "And a generator?")]
        assert [a.mode for a in answers] == ["full", "full"]
        assert pipeline.fallbacks == {"gate": 2}
        pipeline.gate = type(pipeline.gate)()  # whoever measures opens it
        assert pipeline.chat().ask("What is lambda?", SHORT).mode.startswith("blend")


def test_a_passed_verdict_names_the_mode(store, llama):
    put_verdict(store, llama.fingerprint, "blend:strided@0.5", "blend:head_query@0.5")
    with RagPipeline.from_store(store, engine=llama) as pipeline:
        assert str(pipeline.mode) == "blend:strided@0.5"
        assert pipeline.ask("What is lambda?", options=SHORT).mode == "blend:strided@0.5"
        assert pipeline.ask("What is lambda?", mode="reuse", options=SHORT).mode == "reuse"
    with RagPipeline.from_store(store, engine=llama, mode="reuse") as pipeline:
        assert str(pipeline.mode) == "reuse"


def test_the_user_s_verdict_is_for_every_store(store, llama, tmp_path):
    put_verdict(tmp_path / "home", llama.fingerprint, "blend:strided@0.5")
    with RagPipeline.from_store(store, engine=llama) as pipeline:
        assert str(pipeline.mode) == "blend:strided@0.5"


def test_a_required_gate(store, llama):
    for mode in (None, "reuse", "blend:strided@0.5"):
        with pytest.raises(GateError, match=r"has not measured this model: run blendkv calibrate --model .* --store "):
            RagPipeline.from_store(store, engine=llama, mode=mode, require_gate=True)
    with RagPipeline.from_store(store, engine=llama, mode="full", require_gate=True) as pipeline:
        assert pipeline.ask("What is lambda?", options=SHORT).mode == "full"
        with pytest.raises(GateError, match=r"run blendkv calibrate"):
            pipeline.ask("What is lambda?", mode="reuse", options=SHORT)
    put_verdict(store, llama.fingerprint)
    with pytest.raises(GateError, match=r"did not pass this model: KL 0.9, allowed 0.05; use mode full"):
        RagPipeline.from_store(store, engine=llama, require_gate=True)
    put_verdict(store, llama.fingerprint, "blend:strided@0.5")
    with pytest.raises(GateError, match=r"did not pass reuse; it passed blend:strided@0.5"):
        RagPipeline.from_store(store, engine=llama, mode="reuse", require_gate=True)
    with RagPipeline.from_store(store, engine=llama, require_gate=True) as pipeline:
        assert pipeline.ask("What is lambda?", options=SHORT).mode == "blend:strided@0.5"
        with pytest.raises(GateError, match=r"name one of these"):
            pipeline.ask("What is lambda?", mode="blend:strided@0.6", options=SHORT)
        assert pipeline.fallbacks == {}


def test_a_damaged_verdict_is_said_at_open(store, llama):
    put_verdict(store, llama.fingerprint).write_text("{")
    with pytest.raises(InputError, match=r"holds no gate verdict"):
        RagPipeline.from_store(store, engine=llama)
