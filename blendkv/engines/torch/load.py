"""Loading models into transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from blendkv.engines.folders import reason_of
from blendkv.errors import ModelLoadError

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
            f"device {device!r} cannot be used ({reason_of(error)}); allowed: auto, cpu, cuda, cuda:0, ..."
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder)
        wanted: Any = _DTYPES[dtype] or getattr(config, "dtype", None) or "auto"
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=wanted, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # loaders of third-party models raise anything
        raise ModelLoadError(f"{folder} cannot be loaded as a causal language model: {reason_of(error)}") from error
    if found["missing_keys"]:  # transformers would go on with random numbers in their place
        missing = sorted(found["missing_keys"])
        raise ModelLoadError(
            f"{folder} holds no weights for {missing[0]} and {len(missing) - 1} others; give a whole checkpoint"
        )
    return model.to(target).eval(), tokenizer
