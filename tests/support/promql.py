"""Which metrics and labels a PromQL expression names: enough of its grammar for that, and no more."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_TIMES = re.compile(r"\[[^\]]*\]|\b\d[\w.]*")  # ranges, durations and numbers
_MODIFIER = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)?\s*\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_:][\w:]*")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


@dataclass
class Named:
    """Metrics with the labels that they are selected by, and the labels that results are grouped by."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)


def named(expression: str) -> Named:
    """Read an expression."""
    found = Named()
    rest = _TIMES.sub(" ", _STRING.sub('""', expression))
    for _, labels in _MODIFIER.findall(rest):
        found.groups |= set(_NAME.findall(labels))
    rest = _MODIFIER.sub(" ", rest)
    for name, matchers in _SELECTOR.findall(rest):
        found.metrics.setdefault(name, set()).update(m.split('"')[0].strip("=~! ") for m in matchers.split(",") if m)
    rest = _SELECTOR.sub(" ", rest)
    for match in _NAME.finditer(rest):
        called = rest[match.end() :].lstrip().startswith("(")
        if not called and match[0].lower() not in _WORDS:
            found.metrics.setdefault(match[0], set())
    return found
