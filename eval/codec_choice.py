"""The smallest codec that costs a model nothing: judged on the same items as raw chunk KVs, difference by difference.

Codecs are judged from the largest down until one fails, so that a false pass needs the first unfit one to pass, and
their number costs no confidence (as the ladders of `blendkv.eval.judging`). A codec is taken when the upper bound of
its mean excess KL over raw is within `MARGIN`, and the quality gate passes the model with it.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blendkv.blend import parse_mode
from blendkv.blend.codec_choice import CodecChoice, CodecEvidence
from blendkv.blend.gate import DEFAULT_MODE, Target, Verdict
from blendkv.engines.base import ModelRunner, head_dims, kv_bytes_per_token
from blendkv.errors import InputError
from blendkv.eval.calibrate import CHUNKS, Progress, calibrate
from blendkv.eval.items import EvalItem
from blendkv.eval.judging import behind
from blendkv.eval.modes import EvalMode, parse_eval_mode
from blendkv.eval.stats import lower_bound, upper_bound
from blendkv.eval.subject import Subject, build
from blendkv.store.codecs import CODECS, RAW

AUTO = "auto"
"""What the command line calls the choice."""
MARGIN = 0.005
"""Most excess KL in nats that counts as noise: five times what bfloat16 alone makes of the demo model, .0010."""
LADDER = ("int8", "turbo4", "turbo3", "turbo2")
"""The candidates, the largest first. `fp8` is not among them: it has the size of `int8`, and more error."""
_LOOK = 8
"""After so many items each, what has no hope is given up."""


@dataclass
class _Measured:
    """A codec, item by item: KL to full prefill, and that minus raw's."""

    codec: str
    size: float
    kl: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)
    given_up: str = ""


def codec_sizes(runner: ModelRunner) -> dict[str, float]:
    """Bytes of a stored token over those of a raw one, of every codec of `LADDER` that the model's heads fit."""
    raw, dims = kv_bytes_per_token(runner), head_dims(runner)
    fitting = [name for name in LADDER if not any(CODECS.get(name).refuses(dim) for dim in dims)]
    return {name: kv_bytes_per_token(runner, name) / raw for name in fitting}


def choose_codec(
    subjects: Callable[[str], Subject],
    sizes: Mapping[str, float],
    items: Sequence[EvalItem],
    *,
    target: Target | None = None,
    candidates: Sequence[str] | None = None,
    chunks: int | None = CHUNKS,
    recipe: str = "system",
    seed: int = 0,
    data: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda stage, done, total: None,
) -> tuple[CodecChoice, list[Verdict]]:
    """Judge raw chunk KVs and the codecs of ``sizes``, and choose the smallest within noise of raw.

    The codecs are compared in the mode that the gate passes raw with, or in `DEFAULT_MODE` where it passes none: raw
    is chosen then. Nothing in it is random but the order of the items and the bootstrap, both by ``seed``.

    Parameters
    ----------
    subjects
        The model with chunk KVs stored by a codec, the same engine for all: what full prefill answered is computed
        once and compared with all of them.
    sizes
        Of `codec_sizes`.
    items, target, candidates, chunks, recipe, seed, data, tell, progress
        As for `blendkv.eval.calibrate.calibrate`.

    Returns
    -------
    tuple[CodecChoice, list[Verdict]]
        The choice, and the gate's verdict on raw and on every codec that was within noise.

    Raises
    ------
    InputError
        As `blendkv.eval.calibrate.calibrate`.
    """
    target = target or Target()

    def judge(codec: str, modes: Sequence[str] | None) -> Verdict:
        tell(f"judging the model with chunk KVs stored as {codec}")
        return calibrate(
            subjects(codec), items, target=target, candidates=modes, chunks=chunks, recipe=recipe, seed=seed, data=data,
            tell=tell, progress=progress,
        )  # fmt: skip

    raw = judge(RAW, candidates)
    mode, level = raw.mode or DEFAULT_MODE, target.confidence
    measured, rounding = _measure(subjects, sizes, items, parse_eval_mode(mode), chunks, level, seed, progress)
    rows, verdicts = _rows(measured, level, seed), [raw]
    if not raw.passed:
        rows = [replace(r, passed=False, note=r.note or "the gate passes no mode of this model") for r in rows]
    chosen = RAW
    for place, row in enumerate(rows):
        if not row.passed:
            break
        verdict = judge(row.codec, raw.modes)
        verdicts.append(verdict)
        if not verdict.passed:
            rows[place] = replace(row, passed=False, note=f"the gate did not pass: {verdict.summary}")
            rows[place + 1 :] = [replace(r, passed=False, note=behind(row.codec)) for r in rows[place + 1 :]]
            break
        chosen = row.codec
    choice = CodecChoice(
        chosen, mode, MARGIN, level, tuple(rows), rounding, _summary(chosen, rows, mode), raw.model,
        raw.dtype, raw.engine, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        {**(data or {}), "items": len(items), "seed": seed, "chunks": chunks},
    )  # fmt: skip
    return choice, verdicts


def _measure(
    subjects: Callable[[str], Subject],
    sizes: Mapping[str, float],
    items: Sequence[EvalItem],
    mode: EvalMode,
    chunks: int | None,
    level: float,
    seed: int,
    progress: Progress,
) -> tuple[list[_Measured], float | None]:
    """Every codec on every item, the largest first, and the mean KL that rounding alone makes."""
    measured = [_Measured(c, s) for c, s in sorted(sizes.items(), key=lambda pair: -pair[1])]
    raw, exact = subjects(RAW), EvalMode("full", parse_mode("full"))
    rounding: list[float] = []
    for number, item in enumerate(items):
        running = [m for m in measured if not m.given_up]
        if not running:
            break
        built = build(raw, item, chunks)
        raw.prepare(built)
        truth = raw.truth(built)
        rounding.append(raw.compare(built, exact, truth).kl)
        base = raw.compare(built, mode, truth).kl
        for one in running:
            subject = subjects(one.codec)
            subject.prepare(built)
            _note(one, built.record.item, _kl(subject, built, mode, truth), base)
        if (number + 1) % _LOOK == 0:
            _give_up(measured, level, seed)
        progress("codecs", number + 1, len(items))
    return measured, statistics.fmean(rounding) if rounding else None


def _kl(subject: Subject, built: Any, mode: EvalMode, truth: Any) -> float | str:
    try:
        return subject.compare(built, mode, truth).kl
    except InputError as error:
        return str(error)


def _note(one: _Measured, item: str, kl: float | str, base: float) -> None:
    if isinstance(kl, str):
        one.given_up = kl
    elif not math.isfinite(kl - base):
        one.given_up = f"its KL on {item} is {kl}, raw's {base}"
    else:
        one.kl.append(kl)
        one.excess.append(kl - base)


def _give_up(measured: Sequence[_Measured], level: float, seed: int) -> None:
    """Stop measuring what clearly exceeds the margin, and all smaller ones: they could not pass behind it."""
    failed = ""
    for one in measured:
        if not one.given_up and failed:
            one.given_up = behind(failed)
        if not one.given_up and (least := lower_bound(one.excess, level, seed)) > MARGIN:
            one.given_up = f"its excess is at least {least:.3g}"
        failed = failed or (one.codec if one.given_up else "")


def _rows(measured: Sequence[_Measured], level: float, seed: int) -> list[CodecEvidence]:
    """The codecs, judged; the first that fails fails all smaller ones."""
    rows: list[CodecEvidence] = []
    failed = ""
    for one in measured:
        upper = upper_bound(one.excess, level, seed)
        note = one.given_up
        if not note and not upper <= MARGIN:
            note = f"its excess may be as high as {upper:.3g}"
        if not note and failed:
            note = behind(failed)
        failed = failed or (one.codec if note else "")
        figures = _mean(one.kl), _mean(one.excess), upper if math.isfinite(upper) else None
        rows.append(CodecEvidence(one.codec, one.size, len(one.excess), *figures, not note, note))
    return rows


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _summary(chosen: str, rows: Sequence[CodecEvidence], mode: str) -> str:
    """The choice in one line."""
    if chosen == RAW:
        why = f"; {rows[0].codec}: {rows[0].note}" if rows else ", the only codec that this model's heads fit"
        return f"codec {RAW}{why}"
    row = next(r for r in rows if r.codec == chosen)
    return (
        f"codec {chosen}: {row.size:.3f} of the bytes, KL {row.excess:+.3g} to raw's (at most {row.excess_upper:+.3g}, "
        f"allowed +{MARGIN:g}), in {mode}, {row.n} items"
    )
