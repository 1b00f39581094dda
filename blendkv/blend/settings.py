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
_SUFFIXES: dict[str, ShiftKind] = {"-shift": "off", "+mean": "mean", "+js": "js", "+eb": "eb", "+trend": "trend"}
_SHIFT: ShiftKind = "js"
"""What ``+shift`` stands for where the selector has none of its own."""
_FORM = re.compile(
    r"blend(?::(?P<selector>[^@+-]*))?(?:@(?P<budget>(?:[^@+-]|(?<=e)[+-](?=\d))*))?(?P<suffixes>(?:[+-]\w+)*)"
)


@dataclass(frozen=True)
class BlendSettings:
    """Selector, budget (share of reusable tokens x layers, in [0, 1]) and shift of a blend.

    ``budget`` and ``shift`` default to the selector's own. ``probes`` evenly spaced tokens per chunk, within the
    budget, estimate the shift alone; by default the selector says which tokens do.
    """

    selector: str = "head_query"
    budget: float | None = None
    shift: ShiftKind | None = None
    probes: int | None = None

    def __post_init__(self) -> None:
        rule = self.rule
        if self.budget is not None and not (math.isfinite(self.budget) and 0.0 <= self.budget <= 1.0):
            raise InputError(f"budget {self.budget} is outside [0, 1]; the default of {rule.name} is {rule.budget}")
        if self.shift is not None and self.shift not in SHIFT_KINDS:
            raise InputError(f"unknown shift {self.shift!r}; allowed: {', '.join(SHIFT_KINDS)}")
        if self.probes is not None and self.probes < 1:
            raise InputError(f"probes is {self.probes}; at least 1 per chunk is allowed, None for the selector's own")

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
        probes = "" if self.blend.probes is None else f"+p{self.blend.probes}"
        return f"blend:{self.blend.selector}@{self.blend.asked:.15g}{suffix}{probes}"


def parse_mode(spec: str) -> Mode:
    """Read ``full``, ``reuse`` or ``blend[:SELECTOR][@BUDGET]``, then suffixes: a shift, probes per chunk.

    ``+js``, ``+eb``, ``+trend``, ``+mean`` and ``-shift`` say which shift (`blendkv.blend.shift`), ``+shift`` the
    selector's own or ``js``, ``+p8`` that 8 probes per chunk estimate it.

    Raises
    ------
    InputError
        If the spec has another form, an unknown selector, or a budget outside [0, 1].
    """
    if spec in ("full", "reuse"):
        return Mode(spec)  # type: ignore[arg-type]
    form = _FORM.fullmatch(spec)
    if form is None:
        raise InputError(_unknown(spec))
    selector = form["selector"] or "head_query"
    shift: ShiftKind | None = None
    probes: int | None = None
    for suffix in re.findall(r"[+-]\w+", form["suffixes"]):
        if suffix == "+shift" and shift is None:
            own = SELECTORS.get(selector).shift
            shift = _SHIFT if own == "off" else own
        elif suffix in _SUFFIXES and shift is None:
            shift = _SUFFIXES[suffix]
        elif re.fullmatch(r"\+p\d+", suffix) and probes is None:
            probes = int(suffix[2:])
        else:
            raise InputError(_unknown(spec))
    try:
        budget = None if form["budget"] is None else float(form["budget"])
    except ValueError:
        budget = math.nan
    if budget is not None and math.isnan(budget):
        raise InputError(_unknown(spec))
    return Mode("blend", BlendSettings(selector, budget, shift, probes))


def _unknown(spec: str) -> str:
    return (
        f"unknown mode {spec!r}; allowed: full, reuse, blend:SELECTOR@BUDGET, for instance blend:head_query@0.05 "
        f"(selectors: {', '.join(SELECTORS.names())}; +shift, -shift, +eb, +trend, +js or +mean may follow, and +p8)"
    )
