"""The backends, and whether each works on this machine."""

from __future__ import annotations

import importlib.util
import os

import torch

NAMES = ("flash", "cuda", "triton", "cpu", "torch", "reference")


def interpreting() -> bool:
    """Whether Triton's kernels are run by its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(backend: str) -> str | None:
    """Why a backend cannot be used here, in words; None if it can. The first call may compile."""
    from blendkv.kernels import build  # not before: `python -m blendkv.kernels.build` finds it not yet imported

    if backend == "cpu":
        return build.why_not("cpu")
    if backend == "flash":
        if importlib.util.find_spec("flash_attn") is None:
            return "flash-attn is not installed: pip install 'blendkv[gpu]'"
        return None if torch.cuda.is_available() else "there is no CUDA device"
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed: pip install 'blendkv[gpu]'"
        if not interpreting() and not torch.cuda.is_available():
            return "there is no GPU (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
    if backend == "cuda":
        return "there is no CUDA device" if not torch.cuda.is_available() else build.why_not("cuda")
    return None
