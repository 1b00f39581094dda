"""A vLLM engine in this process per tiny checkpoint: float32, eager, one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny import build
from transformers import PreTrainedModel

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
)  # fmt: skip


@pytest.fixture
def start() -> Any:
    """The context manager that starts vLLM on a folder."""
    return _engine


@contextmanager
def _engine(folder: Path) -> Iterator[Any]:
    """Start vLLM on a checkpoint; stopped and cleaned up afterwards."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, distributed_executor_backend="uni", max_model_len=512,
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.fixture
def tiny_checkpoint(tmp_path):
    """Write a tiny model of a family to disk; head dims that vLLM's CPU attention takes."""

    def make(family: str, **overrides: Any) -> tuple[Path, PreTrainedModel]:
        model = build(family, head_dim=32, hidden_size=128, **overrides)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family, model

    return make
