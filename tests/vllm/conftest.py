"""Tiny checkpoints on disk, for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import build
from transformers import PreTrainedModel


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """Write a tiny model of a family to disk; head dims that vLLM's CPU attention takes."""

    def make(family: str, **overrides: Any) -> tuple[Path, PreTrainedModel]:
        model = build(family, head_dim=32, hidden_size=128, **overrides)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family, model

    return make
