"""Checks of the ops' arguments: every error names the argument, what it is, and what is allowed."""

from __future__ import annotations

import torch

from blendkv.errors import InputError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refuse(name: str, given: object, allowed: str) -> InputError:
    """The error for an argument."""
    return InputError(f"{name} is {given}; allowed: {allowed}")


def shape(name: str, tensor: torch.Tensor, *wanted: int | None) -> None:
    """Check the number of dimensions, and every size that is not None."""
    given = tensor.shape
    if given == wanted:
        return
    if len(given) == len(wanted) and all(w is None or g == w for g, w in zip(given, wanted, strict=True)):
        return
    text = ", ".join("*" if w is None else str(w) for w in wanted)
    raise refuse(name, f"of shape {list(given)}", f"[{text}]")


def dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Check the dtype."""
    if tensor.dtype not in allowed:
        raise refuse(name, tensor.dtype, ", ".join(map(str, allowed)))


def device(name: str, tensor: torch.Tensor, like: torch.Tensor, of: str) -> None:
    """Check that two arguments are on one device."""
    if tensor.device != like.device:
        raise refuse(name, f"on {tensor.device}", f"the device of {of}, {like.device}")


def at_least(name: str, value: int | None, low: int) -> None:
    """Check a number that may be absent."""
    if value is not None and value < low:
        raise refuse(name, value, f"{low} or more")
