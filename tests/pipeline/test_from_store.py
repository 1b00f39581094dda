"""Opening a pipeline by the path of its store: what is remembered, and what is refused."""

from __future__ import annotations

import sqlite3

import pytest
from tiny_hub import make_tokenizer, open_pipeline, write_corpus

from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError, MissingDependencyError, StoreMismatchError
from blendkv.pipeline import RagPipeline, check_store


def test_settings_are_remembered(llama_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(llama_folder.parent)
    with RagPipeline.from_store(tmp_path / "s", llama_folder.name, recipe="bos", system="") as made:
        assert made.prompts.system == ""
    monkeypatch.chdir(tmp_path)
    with RagPipeline.from_store(tmp_path / "s") as again:
        assert again.engine.name == str(llama_folder)
        assert (again.library.kind, again.prompts.system) == ("bos", "")
    with RagPipeline.from_store(tmp_path / "s", recipe="system", system="Hi.", mode="reuse") as other:
        assert (other.library.kind, other.prompts.system, str(other.mode)) == ("system", "Hi.", "reuse")


def test_the_store_of_another_model(llama, llama_folder, other_folder, tmp_path):
    RagPipeline.from_store(tmp_path / "s", engine=llama).close()
    with pytest.raises(StoreMismatchError) as caught:
        RagPipeline.from_store(tmp_path / "s", str(other_folder))
    message = str(caught.value)
    assert "\n" not in message
    assert str(llama_folder) in message
    assert str(other_folder) in message
    assert "use that model, or ingest into another store" in message


def test_another_tokenizer(llama, tmp_path):
    RagPipeline.from_store(tmp_path / "s", engine=llama).close()
    other = TorchEngine(llama.model, make_tokenizer(merges=59))
    with pytest.raises(StoreMismatchError):
        RagPipeline.from_store(tmp_path / "s", engine=other)


@pytest.mark.parametrize("database", ["index.sqlite", "collection.sqlite"])
def test_a_newer_format(llama, tmp_path, database):
    RagPipeline.from_store(tmp_path / "s", engine=llama).close()
    connection = sqlite3.connect(tmp_path / "s" / database)
    with connection:
        table = "meta" if database == "collection.sqlite" else None
        if table:
            connection.execute("UPDATE meta SET value = '999' WHERE key = 'format'")
        else:
            connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(StoreMismatchError, match="newer"):
        RagPipeline.from_store(tmp_path / "s", engine=llama)


def test_nothing_is_made_for_wrong_arguments(llama, tmp_path):
    for wrong in (
        {"model": str(tmp_path / "none")}, {"mode": "bogus"}, {"memory": "2XB"}, {"disk": "many"},
    ):  # fmt: skip
        with pytest.raises(InputError):
            RagPipeline.from_store(tmp_path / "s", **wrong)
        assert not (tmp_path / "s").exists()
    with pytest.raises(InputError, match=r"unknown engine 'llama\.cpp'; allowed: torch, vllm"):
        RagPipeline.from_store(tmp_path / "s", llama.name, engine="llama.cpp")
    assert not (tmp_path / "s").exists()
    with pytest.raises(InputError, match="unknown recipe 'none'"):
        RagPipeline.from_store(tmp_path / "s", engine=llama, recipe="none")


def test_vllm_that_is_not_installed(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("blendkv.engines.vllm.arguments.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'blendkv\[vllm\]'"):
        RagPipeline.from_store(tmp_path / "s", str(llama_folder), engine="vllm")
    assert not (tmp_path / "s").exists()


def test_an_engine_that_was_given_is_not_closed(llama, llama_folder, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(TorchEngine, "close", lambda self: closed.append(self))
    RagPipeline.from_store(tmp_path / "s", engine=llama).close()
    assert closed == []
    with RagPipeline.from_store(tmp_path / "s", str(llama_folder)) as pipeline:
        engine = pipeline.engine
    assert closed == [engine]
    with pytest.raises(InputError, match="unknown recipe"):
        RagPipeline.from_store(tmp_path / "s", str(llama_folder), recipe="none")
    assert len(closed) == 2


def test_a_path_that_is_no_store(llama, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        RagPipeline.from_store(tmp_path / "file", engine=llama)
    with pytest.raises(InputError, match="holds no store; make one with: blendkv ingest"):
        check_store(tmp_path)


def test_another_embedder(llama, tmp_path):
    with open_pipeline(tmp_path / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "c", ["with"])], precompute="lazy")
    with pytest.raises(InputError, match="embedded with 'bag'"):
        RagPipeline.from_store(tmp_path / "s", engine=llama)
