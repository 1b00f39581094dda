"""Fingerprints: content decides; KV of another model never matches."""

from __future__ import annotations

import copy as copying
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import seed_of_run
from tiny_hub import make_tokenizer

from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.torch.engine import TorchEngine


@pytest.fixture
def copy(llama_folder, tmp_path):
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def test_a_copy_is_the_same_model(llama_folder, copy):
    os.utime(copy / "model.safetensors", (1, 1))
    assert fingerprint_folder(copy) == fingerprint_folder(llama_folder)


def test_who_saved_it_and_how_it_is_loaded_do_not_count(llama_folder, copy):
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "0", "_name_or_path": "x", "dtype": "bfloat16"}
    (copy / "config.json").write_text(json.dumps(config, indent=7))
    (copy / "README.md").write_text("hello")
    assert fingerprint_folder(copy) == fingerprint_folder(llama_folder)


def test_one_byte_of_the_weights(llama_folder, copy):
    seed = seed_of_run()
    print(f"seed {seed}")
    data = bytearray((copy / "model.safetensors").read_bytes())
    at = random.Random(seed).randrange(len(data))
    data[at] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert fingerprint_folder(copy) != fingerprint_folder(llama_folder)


def test_config_and_tokenizer_count(llama_folder, copy):
    found = {fingerprint_folder(llama_folder)}
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    found.add(fingerprint_folder(copy))
    (copy / "config.json").write_text(json.dumps(config))
    make_tokenizer(merges=59).save_pretrained(copy)
    found.add(fingerprint_folder(copy))
    assert len(found) == 3


def test_weights_under_another_name_are_other_weights(copy):
    before = fingerprint_folder(copy)
    tensors = load_file(copy / "model.safetensors")
    a, b = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, a: tensors[b].clone(), b: tensors[a].clone()}, copy / "model.safetensors", {"format": "pt"})
    assert fingerprint_folder(copy) != before


def test_model_in_memory(llama, llama_folder):
    twin = TorchEngine.load(str(llama_folder))
    first, again = TorchEngine(llama.model, llama.tokenizer), TorchEngine(twin.model, twin.tokenizer)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != llama.fingerprint  # nobody knows which folder it came from
    other = copying.deepcopy(twin.model)
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-6
    changed = {first.fingerprint, TorchEngine(other, twin.tokenizer).fingerprint}
    changed.add(TorchEngine(twin.model, make_tokenizer(merges=59)).fingerprint)
    changed.add(TorchEngine(twin.model.bfloat16(), twin.tokenizer).fingerprint)
    assert len(changed) == 4
