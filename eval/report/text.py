"""Figures and foreign text as the page shows them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

DASH = "–"
"""Stands where nothing was measured."""

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and new line
    "\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff"  # no width, or the direction of what follows
    "\ud800-\udfff\ufffe\uffff]"  # no characters at all
)


def clean(text: str) -> str:
    """Text without characters that a page cannot hold, or that would hide or turn around what stands beside them.

    Control characters become their pictures; the halves of a broken character become the replacement character.
    """
    return _UNSEEN.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def measured(row: Mapping[str, Any] | None, *path: str) -> float | None:
    """A figure by its path through nested mappings; None where any step is missing, null, or no finite number."""
    found: Any = row
    for step in path:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


def figure(value: float | None, digits: int = 3) -> str:
    """A figure of so many significant digits, with no more exponent than needed; a dash for None."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{max(digits - 2, 0)}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def fixed(value: float | None, places: int = 3) -> str:
    """A figure of so many decimals; a dash for None."""
    return DASH if value is None else f"{value:.{places}f}"


def percent(value: float | None, places: int = 1) -> str:
    """A share in per cent; a dash for None."""
    return DASH if value is None else f"{100 * value:.{places}f}\u00a0%"


def milliseconds(value: float | None) -> str:
    """A time given in milliseconds, in the unit that reads best."""
    if value is None:
        return DASH
    return f"{value / 1e3:.2f}\u00a0s" if value >= 1e4 else f"{figure(value)}\u00a0ms"


def size(value: float | None) -> str:
    """A number of bytes, in MiB or GiB."""
    if value is None:
        return DASH
    return f"{value / 2**30:.1f}\u00a0GiB" if value >= 2**33 else f"{value / 2**20:.1f}\u00a0MiB"


def whole(value: float | None) -> str:
    """A count; a dash for None."""
    return DASH if value is None else f"{value:.0f}"


def listed(names: list[str]) -> str:
    """Names in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
