"""How Python starts the CUDA kernels: argument structures, streams, errors, and tensors as the kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from blendkv.errors import BlendKVError
from blendkv.kernels import build

OLDEST = (8, 0)
"""The first compute capability with bfloat16 products and asynchronous copies."""
CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""Dtypes as ``Type`` of csrc/cuda/device.cuh numbers them."""


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def refuses_device(device: torch.device) -> str | None:
    """Why kernels cannot run where a tensor lies."""
    if device.type != "cuda":
        return f"the tensors are on {device}"
    found = _capability(device.index)
    if found < OLDEST:
        return f"compute capability {found[0]}.{found[1]} is below {OLDEST[0]}.{OLDEST[1]}"
    return None


@contextmanager
def current(device: torch.device) -> Iterator[tuple[int, int]]:
    """Make a device current; yields its index and its stream, as the launchers take it."""
    with torch.cuda.device(device):
        yield torch.cuda.current_device(), torch.cuda.current_stream(device).cuda_stream


def launch(name: str, args: ctypes.Structure, device: torch.device) -> None:
    """Start ``blendkv_cuda_<name>`` behind the device's work; waits for nothing.

    Raises
    ------
    BlendKVError
        With CUDA's words, if the kernel cannot be started.
    """
    library = build.library("cuda")
    with current(device) as (index, stream):
        status = library.blendkv_cuda_use(index)
        status = status or library[f"blendkv_cuda_{name}"](ctypes.byref(args), ctypes.c_void_p(stream))
    if status != 0:
        library.blendkv_cuda_error.restype = ctypes.c_char_p
        text = library.blendkv_cuda_error(status).decode()
        raise BlendKVError(f"CUDA cannot run {name}: {text} (error {status})")


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's first element lies; None for none."""
    return None if tensor is None else tensor.data_ptr()


def in_chunks(tensor: torch.Tensor, bytes_per_chunk: int = 16) -> bool:
    """Whether every vector along the last dim is contiguous and starts at a multiple of ``bytes_per_chunk``."""
    step = bytes_per_chunk // tensor.element_size()
    strides = [s for s, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    return tensor.stride(-1) == 1 and tensor.data_ptr() % bytes_per_chunk == 0 and not any(s % step for s in strides)


def chunked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if its vectors cannot be read 16 bytes at a time."""
    return tensor if in_chunks(tensor) else tensor.clone(memory_format=torch.contiguous_format)
