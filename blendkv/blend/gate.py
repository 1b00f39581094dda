"""The quality gate: whether a model may be blended, and how, as `blendkv calibrate` measured it; see docs/gate.md.

A verdict is about a model and a codec. It lies beside a store, or in the user's BlendKV folder for all stores without
their own.
Without one, blending is allowed; after one that failed, every blend becomes a full prefill.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from blendkv.blend.settings import Mode, parse_mode
from blendkv.config import home
from blendkv.errors import GateError, InputError
from blendkv.store.codecs import RAW
from blendkv.store.files import fsync_directory, make_directory, temporary_file, write_all

_log = logging.getLogger(__name__)
FOLDER = "gate"
FORMAT = 2
REASON = "gate"
"""What fallbacks and metrics call a blend that the gate turned into a full prefill."""
DEFAULT_MODE = "blend:head_query@0.05"
"""What is done when nobody names a mode and no verdict does."""

State = Literal["passed", "failed", "not_measured"]


@dataclass(frozen=True)
class Target:
    """What a blend must keep to, each by a one-sided bound at ``confidence``.

    Attributes
    ----------
    kl
        Most mean KL(full || blend) in nats on full prefill's own continuation.
    f1
        Most that the mean F1 of the answers may be below full prefill's.
    confidence
        Of each bound.
    """

    kl: float = 0.05
    f1: float = 0.01
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 < self.kl < float("inf"):
            raise InputError(f"the gate's KL is {self.kl}; more than 0 nats is allowed")
        if not 0.0 <= self.f1 <= 1.0:
            raise InputError(f"the gate's F1 margin is {self.f1}; 0 to 1 is allowed")
        if not 0.5 <= self.confidence < 1.0:
            raise InputError(f"the gate's confidence is {self.confidence}; 0.5 to below 1 is allowed")


@dataclass(frozen=True)
class Evidence:
    """What was measured of one mode; what was not measured is None.

    Attributes
    ----------
    mode
        The mode spec.
    stage
        ``screen``: dropped after the first part of the items, which the figures are of. ``confirm``: measured on the
        other part.
    n
        Items behind the figures.
    kl, kl_upper
        Mean KL in nats, and its upper bound.
    f1_difference, f1_lower
        Mean F1 minus full prefill's, and its lower bound.
    budget_spent
        Mean share of the reusable tokens that was recomputed.
    cost
        Rows that the blend ran through the model, scoring included, over the rows of a full prefill.
    ttft_ratio
        Median time to the first token over full prefill's.
    passed
        Whether the mode may be used.
    note
        Why not.
    """

    mode: str
    stage: Literal["screen", "confirm"]
    n: int
    kl: float
    kl_upper: float | None
    f1_difference: float | None
    f1_lower: float | None
    budget_spent: float | None
    cost: float | None
    ttft_ratio: float | None
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether blending is close enough to full prefill for a model, with what it was judged by.

    Attributes
    ----------
    passed
        Whether any mode met the target.
    summary
        The verdict in one line, for people.
    mode
        Spec of the cheapest mode that passed; None if none did.
    modes
        All that passed.
    target, evidence
        What was asked for, and what was measured.
    data
        The sample: ``source``, ``format``, ``items``, ``seed``; and ``codec``, how its chunk KVs were stored.
    model, dtype, recipe, engine
        What was measured.
    environment, version, date
        Hardware and packages, BlendKV's version, and when (ISO 8601).
    """

    passed: bool
    summary: str
    mode: str | None = None
    modes: tuple[str, ...] = ()
    target: Target = Target()
    evidence: tuple[Evidence, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    dtype: str = ""
    recipe: str = ""
    engine: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    date: str = ""

    @property
    def codec(self) -> str:
        """How the chunk KVs were stored that it is about."""
        return str(self.data.get("codec", RAW))

    def __post_init__(self) -> None:
        if not isinstance(self.passed, bool) or self.passed != bool(self.modes):
            raise InputError(
                f"a verdict with passed {self.passed!r} and modes {list(self.modes)}; one implies the other"
            )
        if self.mode not in (self.modes or (None,)):
            raise InputError(f"a verdict whose mode {self.mode!r} is none of its modes {list(self.modes)}")
        for mode in self.modes:
            parse_mode(mode)


@dataclass(frozen=True)
class Gate:
    """What a verdict means for requests: the one place where pipelines, servers and vLLM's connector ask.

    Attributes
    ----------
    verdict
        On the model; None if it was not measured.
    required
        Whether only modes that a verdict names may be blended.
    measure
        The command that makes a verdict, for messages.
    """

    verdict: Verdict | None = None
    required: bool = False
    measure: str = "blendkv calibrate --model MODEL --store DIR"

    @classmethod
    def read(cls, store: Path | None, fingerprint: str, model: str, required: bool = False, codec: str = RAW) -> Gate:
        """The gate of a model whose chunk KVs are stored with ``codec``, over a store; None for one without a folder.

        A verdict that was measured with another codec says nothing of this one: the model counts as not measured.

        Raises
        ------
        InputError
            If there is a verdict that cannot be read.
        """
        where = "" if store is None else f" --store {store}"
        how = "" if codec == RAW else f" --codec {codec}"
        measure = f"blendkv calibrate --model {model}{where}{how}"
        verdict = read_verdict(store, fingerprint, codec)
        if verdict is None and (others := _other_codecs(store, fingerprint)):
            _log.warning(
                "the quality gate measured %s with codec %s, chunk KVs are stored with %s: not measured; run %s",
                *(model, ", ".join(others), codec, measure),
            )
        return cls(verdict, required, measure)

    @property
    def state(self) -> State:
        """The verdict in a word."""
        if self.verdict is None:
            return "not_measured"
        return "passed" if self.verdict.passed else "failed"

    @property
    def closed(self) -> str | None:
        """Why nothing may be blended; None if something may."""
        if self.verdict is not None:
            return None if self.verdict.passed else f"the quality gate did not pass this model: {self.verdict.summary}"
        if not self.required:
            return None
        return f"the quality gate is required and has not measured this model: run {self.measure}"

    def check(self, mode: Mode) -> str | None:
        """Why ``mode`` may not be carried out, for people; None if it may. ``reuse`` is a blend at budget 0."""
        if mode.name not in ("reuse", "blend"):
            return None
        if self.closed is not None:
            return self.closed
        if self.required and self.verdict is not None and str(mode) not in self.verdict.modes:
            passed = ", ".join(self.verdict.modes)
            return f"the quality gate is required and did not pass {mode}; it passed {passed}: name one of these"
        return None

    def demand(self, mode: Mode) -> None:
        """Refuse a mode where the gate is required; where it is not, what fails the gate is prefilled in full.

        Raises
        ------
        GateError
            If so, with what to run.
        """
        if not self.required or (why := self.check(mode)) is None:
            return
        advice = "" if self.state != "failed" else f"; use mode full, or measure again with {self.measure}"
        raise GateError(f"{why}{advice}")

    def mode(self, asked: str | None) -> Mode:
        """The mode that is meant: the one asked for, or else the verdict's, or else `DEFAULT_MODE`.

        Raises
        ------
        InputError
            If the spec is not understood.
        """
        own = None if self.verdict is None else self.verdict.mode
        return parse_mode(asked or own or DEFAULT_MODE)


def verdict_path(folder: Path, fingerprint: str, codec: str = RAW) -> Path:
    """Where a store, or the user's BlendKV folder, keeps the verdict on a model with a codec."""
    return folder / FOLDER / f"{fingerprint}{'' if codec == RAW else f'.{codec}'}.json"


def read_verdict(store: Path | None, fingerprint: str, codec: str = RAW) -> Verdict | None:
    """The verdict on a model with a codec: the store's own, or else the user's; None if that was not measured.

    Raises
    ------
    InputError
        If a file does not hold a verdict of a known format.
    """
    for folder in (store, home()):
        if folder is None:
            continue
        # One file per model is how verdicts of every codec were kept before there was one per codec.
        for path in dict.fromkeys((verdict_path(folder, fingerprint, codec), verdict_path(folder, fingerprint))):
            if path.is_file() and (found := _read(path)).codec == codec:
                return found
    return None


def _other_codecs(store: Path | None, fingerprint: str) -> list[str]:
    """The codecs that a model was measured with."""
    folders = [folder for folder in (store, home()) if folder is not None]
    names = (f"{fingerprint}.json", f"{fingerprint}.*.json")
    return sorted({_read(path).codec for folder in folders for n in names for path in (folder / FOLDER).glob(n)})


def _read(path: Path) -> Verdict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT:
            raise ValueError(f"format {found.get('format')!r}")
        values = {f.name: found[f.name] for f in fields(Verdict)}
        values["target"] = Target(**values["target"])
        values["evidence"] = tuple(Evidence(**row) for row in values["evidence"])
        values["modes"] = tuple(values["modes"])
        return Verdict(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(
            f"{path} holds no gate verdict of format {FORMAT} ({why}); remove it, or measure the model again with: "
            "blendkv calibrate"
        ) from error


def write_verdict(folder: Path, fingerprint: str, verdict: Verdict) -> Path:
    """Write a verdict durably and whole, or not at all, under a store or the user's BlendKV folder; returns its path.

    Raises
    ------
    InputError
        If the folder cannot be written.
    """
    path = verdict_path(folder, fingerprint, verdict.codec)
    write_json(path, {"format": FORMAT, **asdict(verdict)})
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write what was measured of a model durably and whole, or not at all.

    Raises
    ------
    InputError
        If the folder cannot be written.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n"
    try:
        make_directory(path.parent)
        with temporary_file(path) as (fd, temporary):
            write_all(fd, text.encode())
            os.fsync(fd)
            temporary.rename(path)
        fsync_directory(path.parent)
    except OSError as error:
        raise InputError(f"the verdict cannot be written to {path}: {error.strerror}; give another --store") from error
