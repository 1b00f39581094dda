"""Where things live, and sizes as people write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from blendkv.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def home() -> Path:
    """The user's BlendKV folder: ``$BLENDKV_HOME``, or ``~/.cache/blendkv``."""
    return Path(os.environ.get("BLENDKV_HOME") or Path.home() / ".cache" / "blendkv")


def parse_bytes(text: str) -> int:
    """Read a size such as ``1GB``, ``512MiB`` or ``1000000``.

    Raises
    ------
    InputError
        If it is not a number with a unit from B to TB or KiB to TiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(
            f"size {text!r} is not understood; allowed: a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Write a size with a decimal unit, three digits."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
