"""How to blend: selector, budget, shift, as a frozen setting and as the mode spec of the command line."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from blendkv.blend.select import SELECTORS, Selector
from blendkv.blend.shift import SHIFT_KINDS, ShiftKind
from blendkv.errors import InputError

ModeName = Literal["full", "reuse", "blend"]
_SUFFIXES: dict[str, ShiftKind] = {"+shift": "js", "-shift": "off", "+mean": "mean"}


@dataclass(frozen=True)
class BlendSettings:
    """Selector, budget (share of reusable tokens x layers, in [0, 1]) and shift of a blend.

    ``budget`` and ``shift`` default to the selector's own.
    """

    selector: str = "head_query"
    budget: float | None = None
    shift: ShiftKind | None = None

    def __post_init__(self) -> None:
        rule = self.rule
        if self.budget is not None and not (math.isfinite(self.budget) and 0.0 <= self.budget <= 1.0):
            raise InputError(f"budget {self.budget} is outside [0, 1]; the default of {rule.name} is {rule.budget}")
        if self.shift is not None and self.shift not in SHIFT_KINDS:
            raise InputError(f"unknown shift {self.shift!r}; allowed: {', '.join(SHIFT_KINDS)}")

    @property
    def rule(self) -> Selector:
        """The selector, looked up by name."""
        return SELECTORS.get(self.selector)

    @property
    def asked(self) -> float:
        """The budget, default filled in."""
        return self.rule.budget if self.budget is None else self.budget

    @property
    def shift_kind(self) -> ShiftKind:
        """The shift, default filled in."""
        return self.rule.shift if self.shift is None else self.shift


@dataclass(frozen=True)
class Mode:
    """A way to answer: ``full`` prefill, full ``reuse`` (blend at budget 0), or ``blend`` with settings."""

    name: ModeName
    blend: BlendSettings | None = None

    @property
    def settings(self) -> BlendSettings | None:
        """What to pass to the blend; None for full prefill."""
        if self.name == "reuse":
            return BlendSettings("strided", 0.0, "off")
        return self.blend

    def __str__(self) -> str:
        if self.blend is None:
            return self.name
        default = self.blend.shift is None or self.blend.shift == self.blend.rule.shift
        suffix = "" if default else next(text for text, kind in _SUFFIXES.items() if kind == self.blend.shift)
        return f"blend:{self.blend.selector}@{self.blend.asked:.15g}{suffix}"


def parse_mode(spec: str) -> Mode:
    """Read ``full``, ``reuse`` or ``blend[:SELECTOR][@BUDGET][+shift|-shift|+mean]``.

    Raises
    ------
    InputError
        If the spec has another form, an unknown selector, or a budget outside [0, 1].
    """
    if spec in ("full", "reuse"):
        return Mode(spec)  # type: ignore[arg-type]
    form = re.fullmatch(r"blend(?::([^@+-]*))?(?:@((?:[^@+-]|(?<=e)[+-](?=\d))*))?([+-]\w+)?", spec)
    try:
        budget = float(form[2]) if form and form[2] is not None else None
    except ValueError:
        budget = math.nan
    suffix = form and form[3]
    if form is None or (budget is not None and math.isnan(budget)) or (suffix and suffix not in _SUFFIXES):
        raise InputError(
            f"unknown mode {spec!r}; allowed: full, reuse, blend:SELECTOR@BUDGET, for instance blend:head_query@0.05 "
            f"(selectors: {', '.join(SELECTORS.names())}; +shift, -shift or +mean may follow)"
        )
    shift = _SUFFIXES[suffix] if suffix else None
    return Mode("blend", BlendSettings(form[1] or "head_query", budget, shift))
