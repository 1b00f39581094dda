"""The codec of a store's chunk KVs: chosen, remembered, changed, refused, and part of the gate's verdict."""

from __future__ import annotations

import logging

import pytest
import torch
from tiny_hub import SYSTEM, BagEmbedder, save_model, write_corpus
from verdicts import verdict

from blendkv.blend.codec_choice import CodecChoice, CodecEvidence, write_choice
from blendkv.blend.gate import Gate, write_verdict
from blendkv.config import home
from blendkv.engines.base import kv_bytes_per_token
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError
from blendkv.library import ChunkLibrary, store_codec, stored_codec
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.store import CODECS, KVStore
from blendkv.types import as_token_ids

QUESTION = "What is a lambda expression?"
MODE = "blend:strided@0.3"


@pytest.fixture(autouse=True)
def bag(monkeypatch):
    monkeypatch.setattr("blendkv.pipeline.SentenceEmbedder", lambda name: BagEmbedder())


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def open_store(folder, engine, codec=None, **options):
    return RagPipeline.from_store(folder, engine=engine, codec=codec, system=SYSTEM, top_k=3, **options)


def fill(folder, engine, corpus, codec=None):
    """Ingest; returns how many chunk KVs were computed."""
    with open_store(folder, engine, codec) as pipeline:
        return pipeline.ingest([corpus], chunk_tokens=48).kv_computed


def chunks(folder):
    """Codecs of the stored chunk KVs, and of what stands at position 0."""
    with KVStore.open(folder, memory_bytes=0) as store:
        rows = store.ls()
    return (
        sorted(row.recipe.codec for row in rows if row.recipe.prefix),
        [row.recipe.codec for row in rows if not row.recipe.prefix],
    )


def test_a_store_keeps_the_codec_it_was_ingested_with(llama, corpus, tmp_path):
    folder = tmp_path / "s"
    assert stored_codec(folder) is None
    computed = fill(folder, llama, corpus, "int8")
    assert stored_codec(folder) == "int8"
    assert chunks(folder) == (["int8"] * computed, ["raw"])  # the system prefix stays as it is
    assert fill(folder, llama, corpus) == 0
    with open_store(folder, llama) as again:
        answer = again.ask(QUESTION, mode=MODE)
        assert (answer.fallback, again.library.recipe.codec) == (None, "int8")
        assert (again.library.counts.computed, again.library.counts.hits) == (0, 3)


def test_opened_with_another_codec_it_says_so_and_computes_anew(llama, corpus, tmp_path, caplog):
    folder = tmp_path / "s"
    computed = fill(folder, llama, corpus)
    with caplog.at_level(logging.WARNING), open_store(folder, llama, "turbo4") as other:
        assert f"{folder} was ingested with codec raw, opened with turbo4" in caplog.text
        assert "ingest with it to change the store" in caplog.text
        other.ask(QUESTION, mode=MODE)
        assert (other.library.counts.computed, other.library.counts.hits) == (3, 0)
        other.ask(QUESTION, mode=MODE)
        assert (other.library.counts.computed, other.library.counts.hits) == (3, 3)
    assert chunks(folder) == (sorted(["raw"] * computed + ["turbo4"] * 3), ["raw"])
    assert stored_codec(folder) == "raw"
    caplog.clear()
    with caplog.at_level(logging.WARNING), open_store(folder, llama) as own:
        assert own.library.recipe.codec == "raw"
    assert fill(folder, llama, corpus, "raw") == 0
    assert "was ingested with" not in caplog.text


def test_ingest_changes_the_store_s_codec(llama, corpus, tmp_path):
    computed = fill(tmp_path / "s", llama, corpus)
    assert fill(tmp_path / "s", llama, corpus, "turbo2") == computed
    with open_store(tmp_path / "s", llama) as pipeline:
        assert pipeline.library.recipe.codec == "turbo2"
        pipeline.ask(QUESTION, mode=MODE)
        assert pipeline.library.counts.computed == 0


@pytest.mark.parametrize("codec", ["int8", "turbo2"])
def test_first_and_later_answers_rest_on_the_same_values(llama, codec, tmp_path):
    """Computed a moment ago, kept in memory, or read from disk: equal keys mean equal values."""
    ids = as_token_ids(range(5, 60))
    with KVStore.open(tmp_path / "s", memory_bytes=1 << 30) as store:
        library = ChunkLibrary(llama, store, "bos", as_token_ids([]), codec)
        (fresh,) = library.compute([ids])
        store.flush()
        held = store.get(fresh.key, ids)
        exact = ChunkLibrary(llama, store, "bos", as_token_ids([]))
        (raw,) = exact.compute([ids])
        seen = [held.layer(i) for i in range(held.layers)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        read = store.get(fresh.key, ids)
        for i in range(fresh.layers):
            for one, two, three, full in zip(fresh.layer(i), seen[i], read.layer(i), raw.layer(i), strict=True):
                assert torch.equal(one, two)
                off = (three - one).norm(dim=-1) / one.norm(dim=-1)
                assert (off > 1e-5).double().mean() < 0.01
                assert not torch.equal(one, full)


def test_what_cannot_be_is_refused_before_anything_is_made(llama, tmp_path):
    with pytest.raises(InputError, match="unknown codec 'zip'; allowed: raw, fp8, int8, turbo4, turbo3, turbo2"):
        open_store(tmp_path / "s", llama, "zip")
    assert not (tmp_path / "s").exists()


def test_heads_that_a_codec_cannot_take(tmp_path, corpus):
    narrow = TorchEngine.load(str(save_model(tmp_path / "narrow", head_dim=12)))
    with pytest.raises(
        InputError, match="codec turbo3 packs 8 values at a time, the head dim is 12; use raw, fp8, int8"
    ):
        open_store(tmp_path / "s", narrow, "turbo3")
    assert stored_codec(tmp_path / "s") is None
    assert fill(tmp_path / "s", narrow, corpus, "int8") > 0


def test_a_model_that_is_not_blended_takes_any_codec(gpt2, tmp_path):
    with open_store(tmp_path / "s", gpt2, "turbo4") as pipeline:
        assert pipeline.ask(QUESTION, mode="full").text is not None


def test_a_byte_budget_counts_bytes_as_they_are_stored(llama, corpus, tmp_path):
    done = {}
    for codec in ("raw", "turbo4"):
        with open_store(tmp_path / codec, llama, codec) as pipeline:
            report = pipeline.ingest([corpus], chunk_tokens=48, precompute_bytes=40_000)
            assert report.kv_left_for_first_use
            done[codec] = report.kv_tokens * kv_bytes_per_token(llama.runner, codec)
            assert 20_000 < done[codec] <= 40_000
    per_token = [kv_bytes_per_token(llama.runner, codec) for codec in CODECS.names()]
    assert per_token == sorted(per_token, reverse=True)
    assert per_token[0] == llama.kv_bytes_per_token


def test_a_verdict_is_for_the_codec_it_was_measured_with(llama, tmp_path, caplog):
    open_store(tmp_path / "s", llama).close()
    write_verdict(tmp_path / "s", llama.fingerprint, verdict(MODE))
    assert Gate.read(tmp_path / "s", llama.fingerprint, "m").state == "passed"
    with caplog.at_level(logging.WARNING):
        gate = Gate.read(tmp_path / "s", llama.fingerprint, "m", codec="turbo2")
    assert gate.state == "not_measured"
    assert "measured m with codec raw, chunk KVs are stored with turbo2" in caplog.text
    assert gate.measure.endswith("--codec turbo2")
    write_verdict(tmp_path / "s", llama.fingerprint, verdict(MODE, data={"codec": "turbo2"}))
    assert Gate.read(tmp_path / "s", llama.fingerprint, "m", codec="turbo2").state == "passed"
    assert Gate.read(tmp_path / "s", llama.fingerprint, "m").state == "passed", "raw's still stands"
    with open_store(tmp_path / "s", llama, "turbo2") as pipeline:
        assert (pipeline.gate.state, str(pipeline.mode)) == ("passed", MODE)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """A home of its own, for a choice; compiled kernels are the other's."""
    own = tmp_path / "home"
    own.mkdir()
    (own / "kernels").symlink_to(home() / "kernels")
    monkeypatch.setenv("BLENDKV_HOME", str(own))
    return own


def chosen(folder, engine, codec="int8", *modes):
    """What `calibrate --codec auto` leaves behind."""
    row = CodecEvidence(codec, 0.5, 30, 0.02, 0.0, 0.001, True)
    write_choice(folder, engine.fingerprint, CodecChoice(codec, MODE, 0.005, 0.95, (row,)))
    write_verdict(folder, engine.fingerprint, verdict(*modes, data={"codec": codec}))


def test_a_new_store_takes_the_codec_that_was_chosen_for_its_model(llama, corpus, user_folder, tmp_path, caplog):
    chosen(user_folder, llama, "int8", MODE)
    folder = tmp_path / "s"
    with caplog.at_level(logging.WARNING), open_store(folder, llama) as pipeline:
        assert f"{folder} stores chunk KVs with codec int8: calibrate chose it for this model" in caplog.text
        assert (pipeline.library.recipe.codec, pipeline.gate.state, str(pipeline.mode)) == ("int8", "passed", MODE)
    assert stored_codec(folder) == "int8"
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        computed = fill(folder, llama, corpus)
    assert "codec" not in caplog.text, "said once"
    assert chunks(folder) == (["int8"] * computed, ["raw"])
    chosen(user_folder, llama, "turbo4", MODE)
    assert fill(folder, llama, corpus) == 0, "a store keeps its codec"


def test_the_choice_is_no_default_where_something_speaks_against_it(llama, other_folder, corpus, user_folder, tmp_path):
    fill(tmp_path / "old", llama, corpus)
    with Collection(tmp_path / "old") as collection:
        collection.set_meta("codec", None)
    chosen(user_folder, llama, "int8", MODE)
    assert store_codec(tmp_path / "old", llama.fingerprint) == "raw", "ingested before stores said their codec"
    assert store_codec(tmp_path / "new", llama.fingerprint) == "int8"
    other = TorchEngine.load(str(other_folder))
    assert store_codec(tmp_path / "new", other.fingerprint) == "raw", "another model"
    with open_store(tmp_path / "named", llama, "raw") as pipeline:
        assert pipeline.library.recipe.codec == "raw"
    chosen(user_folder, llama, "int8")
    with open_store(tmp_path / "failed", llama) as pipeline:
        assert (pipeline.library.recipe.codec, pipeline.gate.state) == ("raw", "not_measured")
