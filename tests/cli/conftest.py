"""The command line in this process, on tiny models, with an embedder without a model."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_hub import SYSTEM, BagEmbedder, write_corpus

from blendkv.cli.main import main
from blendkv.pipeline import RagPipeline


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def bag(monkeypatch):
    monkeypatch.setattr("blendkv.pipeline.SentenceEmbedder", lambda name: BagEmbedder())


@pytest.fixture
def cli(capsys, monkeypatch, own_logging):
    """Run a command; returns its exit code and what it wrote."""
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        written = capsys.readouterr()
        return Result(ended.value.code, written.out, written.err)

    return run


@pytest.fixture(scope="session")
def filled(tmp_path_factory, llama, llama_folder):
    """A store with a corpus in it; copy it before use."""
    folder = tmp_path_factory.mktemp("filled")
    patch = pytest.MonkeyPatch()
    patch.setattr("blendkv.pipeline.SentenceEmbedder", lambda name: BagEmbedder())
    with RagPipeline.from_store(folder / "s", engine=llama, system=SYSTEM) as pipeline:
        pipeline.ingest([write_corpus(folder / "corpus")], chunk_tokens=48)
    patch.undo()
    return folder / "s"


@pytest.fixture
def store(filled, tmp_path):
    return shutil.copytree(filled, tmp_path / "store")


@pytest.fixture(scope="session")
def make_kv():
    path = Path(__file__).parents[1] / "store" / "factory.py"
    spec = importlib.util.spec_from_file_location("blendkv_store_factory", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_kv
