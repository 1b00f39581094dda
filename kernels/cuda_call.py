"""How Python starts the CUDA kernels: argument structures, streams, errors, and tensors as the kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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


@cache
def _function(library: ctypes.CDLL, name: str) -> Callable[[bytes, int], int]:
    found = library[f"blendkv_cuda_{name}"]
    found.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    return found


def on_stream(start: Callable[[int], int], device: torch.device) -> int:
    """Call ``start`` with the stream of a device, which is made current; returns the CUDA error."""
    here = torch.cuda.current_device()
    index = here if device.index is None else device.index
    if index != here:
        with torch.cuda.device(index):
            return on_stream(start, device)
    status: int = build.library("cuda").blendkv_cuda_use(index)
    return status or start(torch.cuda.current_stream(index).cuda_stream)


def launch(name: str, args: bytes, device: torch.device) -> None:
    """Start ``blendkv_cuda_<name>`` behind the device's work; waits for nothing.

    Parameters
    ----------
    name
        Of the launcher.
    args
        Its packed structure: a third of what ctypes takes to fill one field by field.
    device
        Where the tensors lie.

    Raises
    ------
    BlendKVError
        With CUDA's words, if the kernel cannot be started.
    """
    library = build.library("cuda")
    function = _function(library, name)
    status = on_stream(lambda stream: function(args, stream), device)
    if status != 0:
        library.blendkv_cuda_error.restype = ctypes.c_char_p
        text = library.blendkv_cuda_error(status).decode()
        raise BlendKVError(f"CUDA cannot run {name}: {text} (error {status})")


def address(tensor: torch.Tensor | None) -> int:
    """Where a tensor's first element lies; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def in_chunks(tensor: torch.Tensor) -> bool:
    """Whether every vector along the last dim is contiguous and starts at a multiple of 16 bytes."""
    strides = tensor.stride()
    if strides[-1] != 1 or tensor.data_ptr() % 16:
        return False
    step = 16 // tensor.element_size()
    for stride, size in zip(strides[:-1], tensor.shape, strict=False):  # noqa: SIM110 - half the time of any()
        if stride % step and size > 1:
            return False
    return True


def chunked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if its vectors cannot be read 16 bytes at a time."""
    return tensor if in_chunks(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only if it is not contiguous or does not start at a multiple of 16 bytes."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
