"""Copies from page-locked memory are over before a blend lets go of the chunks that it was lent."""

from __future__ import annotations

import pytest
import torch
from daemon_process import DaemonProcess
from scripted_cuda import ScriptedCudart
from tiny_hub import SYSTEM, TOPICS

from blendkv.blend import BlendSettings
from blendkv.daemon.client import DaemonStore
from blendkv.daemon.pinning import Pinning
from blendkv.engines.torch import engine as module
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import DamagedChunkError
from blendkv.prompt import PromptBuilder
from blendkv.retrieval.split import tokenise


def pin_as_on_cuda(store, device):
    """What `pin_for` does where there is a GPU."""
    store.pin_memory(Pinning(ScriptedCudart(), lambda: None))
    return True


def damaged(*arguments):
    """A blend that ends in the middle, behind copies that it began."""
    raise DamagedChunkError("0" * 64, "checksum: a test")


@pytest.mark.parametrize("pinned", [True, False])
def test_a_blend_waits_for_its_copies(llama_folder, tmp_path, monkeypatch, pinned):
    engine = TorchEngine.load(str(llama_folder))
    waited = []
    if pinned:
        monkeypatch.setattr(module, "pin_for", pin_as_on_cuda)
    prompts = PromptBuilder(engine.tokenizer, SYSTEM)
    chunk = tokenise(engine.tokenizer, TOPICS["lambda"], "lambda")[0]
    with DaemonProcess(tmp_path / "s", "4MB"), DaemonStore(tmp_path / "s", 20.0) as store:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(store.daemon_stats().loans))
        library = engine.library(store, "system", prompts.prefix)
        library.precompute([chunk], None)
        prompt = prompts.first([chunk], "What?")
        with library.source(prompt) as source:
            report = engine.blend(prompt, source, engine.new_cache(len(prompt)), BlendSettings("strided", 0.5))
            assert report.reusable_tokens > 0
            assert waited == ([2] if pinned else []), "the prefix and the chunk are still lent"
            monkeypatch.setattr(module, "blend", damaged)
            with pytest.raises(DamagedChunkError):
                engine.blend(prompt, source, engine.new_cache(1), BlendSettings("strided", 0.5))
        assert len(waited) == (2 if pinned else 0)
