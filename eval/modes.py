"""Mode specs of an evaluation: those of the command line, an exact prefix cache, and baselines as published.

``full``, ``reuse`` and ``blend:SELECTOR@BUDGET...`` are `blendkv.blend.parse_mode`'s, with the honest budget.
``prefix`` is what an exact prefix cache gives at best: system prefix and first chunk are held, the rest is prefilled. A
published baseline is named by its own figure, and the budget that this really spends is worked out per prompt:

- ``cacheblend@R`` (arXiv 2405.16444 and its authors' code): the share R of the tokens whose V deviates most at layer 1,
  recomputed in all later layers; the first two layers are computed for every token. Honest: (2 + (L - 2) R) / L.
- ``epic@K`` (LegoLink, arXiv 2410.15332): the first K tokens of every chunk but the first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from blendkv.blend import BlendSettings, Mode, parse_mode
from blendkv.blend.score import CHECK_LAYER
from blendkv.errors import InputError

BASELINES = ("cacheblend", "epic")


@dataclass(frozen=True)
class Sizes:
    """What a baseline's budget depends on: tokens of each chunk that is not exact, all reusable tokens, layers."""

    candidates: Sequence[int]
    reusable: int
    layers: int


@dataclass(frozen=True)
class EvalMode:
    """A way to answer, as an evaluation names it.

    Attributes
    ----------
    spec
        Its name.
    mode
        ``full`` for ``prefix`` too; None for a baseline, whose settings depend on the prompt.
    baseline, nominal
        A published baseline and the figure that it names itself by.
    prefix
        Whether system prefix and first chunk are in an exact prefix cache.
    """

    spec: str
    mode: Mode | None
    baseline: str | None = None
    nominal: float | None = None
    prefix: bool = False

    @property
    def exact(self) -> bool:
        """Whether nothing is blended."""
        return self.mode is not None and self.mode.settings is None

    def resolve(self, sizes: Sizes) -> Mode:
        """The mode for a prompt of these sizes."""
        if self.mode is not None:
            return self.mode
        assert self.nominal is not None
        if sizes.reusable == 0:
            return Mode("reuse")
        if self.baseline == "epic":
            spent = sum(min(int(self.nominal), n) for n in sizes.candidates)
            return Mode("blend", BlendSettings("chunk_head", min(1.0, spent / sizes.reusable), "off"))
        tokens = sum(sizes.candidates)
        early = min(CHECK_LAYER + 1, sizes.layers)
        spent = early * tokens + (sizes.layers - early) * int(self.nominal * tokens)
        return Mode("blend", BlendSettings("kv_deviation", min(1.0, spent / (sizes.layers * sizes.reusable)), "off"))


def parse_eval_mode(spec: str) -> EvalMode:
    """Read a mode spec.

    Raises
    ------
    InputError
        If it has another form, or a figure out of range.
    """
    if spec == "prefix":
        return EvalMode(spec, Mode("full"), prefix=True)
    form = re.fullmatch(rf"({'|'.join(BASELINES)})@(\d+(?:\.\d+)?)", spec)
    if form is None:
        try:
            return EvalMode(spec if spec in ("full", "reuse") else str(parse_mode(spec)), parse_mode(spec))
        except InputError as error:
            raise InputError(f"{error}; also prefix, cacheblend@RATIO and epic@TOKENS") from None
    figure = float(form[2])
    if form[1] == "cacheblend" and not 0.0 < figure <= 1.0:
        raise InputError(f"cacheblend@{form[2]}: the nominal ratio is more than 0 and at most 1, for instance 0.15")
    if form[1] == "epic" and (figure < 1 or figure != int(figure)):
        raise InputError(f"epic@{form[2]}: whole tokens per chunk are allowed, for instance epic@32")
    return EvalMode(f"{form[1]}@{figure:g}", None, form[1], figure)


def parse_eval_modes(text: str) -> list[EvalMode]:
    """Read a comma-separated list; each mode once, in order.

    Raises
    ------
    InputError
        If a spec is not understood, or there is none.
    """
    modes = {mode.spec: mode for mode in map(parse_eval_mode, (s.strip() for s in text.split(",") if s.strip()))}
    if not modes:
        raise InputError("no mode is given; name at least one, for instance full,reuse,blend:head_query@0.05")
    return list(modes.values())
