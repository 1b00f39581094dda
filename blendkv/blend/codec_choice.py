"""The codec that a model's new stores use: the smallest that `blendkv calibrate --codec auto` found to cost nothing.

A choice lies beside the gate's verdicts, and counts only together with one that passed the model with that codec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blendkv.blend.gate import FOLDER, read_verdict, write_json
from blendkv.config import home
from blendkv.errors import InputError
from blendkv.store.codecs import CODECS, RAW

_SUBFOLDER = "codecs"
_FORMAT = 1


@dataclass(frozen=True)
class CodecEvidence:
    """What a codec costs a model, measured against raw chunk KVs on the same items.

    Attributes
    ----------
    codec
        Its name.
    size
        Bytes of a stored token over those of a raw one.
    n
        Items behind the figures.
    kl
        Mean KL to full prefill, in nats.
    excess, excess_upper
        Mean of the paired differences of that KL to raw's, in nats, and its upper bound.
    passed
        Whether it may be chosen.
    note
        Why not.
    """

    codec: str
    size: float
    n: int
    kl: float | None
    excess: float | None
    excess_upper: float | None
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class CodecChoice:
    """The codec of a model's new stores, and what it was chosen by.

    Attributes
    ----------
    codec
        The choice.
    mode
        The mode that the codecs were compared in.
    margin
        Most that ``excess_upper`` may be, in nats.
    confidence
        Of that bound.
    rows
        Every codec that was measured, the largest first.
    rounding
        Mean KL in nats between full prefill and itself in another order of steps: what the dtype's rounding makes on
        the same items.
    summary
        The choice in one line, for people.
    model, dtype, engine, date
        What was measured, and when (ISO 8601).
    data
        The sample.
    """

    codec: str
    mode: str
    margin: float
    confidence: float
    rows: tuple[CodecEvidence, ...]
    rounding: float | None = None
    summary: str = ""
    model: str = ""
    dtype: str = ""
    engine: str = ""
    date: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        CODECS.get(self.codec)
        if self.codec != RAW and self.codec not in [row.codec for row in self.rows if row.passed]:
            raise InputError(f"a choice of codec {self.codec}, which did not pass")


def choice_path(folder: Path, fingerprint: str) -> Path:
    """Where a store, or the user's BlendKV folder, keeps the choice for a model."""
    return folder / FOLDER / _SUBFOLDER / f"{fingerprint}.json"


def write_choice(folder: Path, fingerprint: str, choice: CodecChoice) -> Path:
    """Write a choice durably and whole, or not at all; returns its path.

    Raises
    ------
    InputError
        If the folder cannot be written.
    """
    path = choice_path(folder, fingerprint)
    write_json(path, {"format": _FORMAT, **asdict(choice)})
    return path


def read_choice(store: Path | None, fingerprint: str) -> CodecChoice | None:
    """The choice for a model: the store's own, or else the user's; None if there is none.

    Raises
    ------
    InputError
        If the file does not hold a choice of a known format.
    """
    for folder in (store, home()):
        if folder is not None and (path := choice_path(folder, fingerprint)).is_file():
            return _read(path)
    return None


def _read(path: Path) -> CodecChoice:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != _FORMAT:
            raise ValueError("another format")
        found["rows"] = tuple(CodecEvidence(**row) for row in found["rows"])
        return CodecChoice(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        raise InputError(
            f"{path} holds no choice of a codec of format {_FORMAT} ({error!r}); remove it, or measure the model again "
            "with: blendkv calibrate --codec auto"
        ) from error


def default_codec(store: Path | None, fingerprint: str) -> str:
    """The codec of a new store of a model: what was chosen, if the gate passed the model with it, or else raw.

    Parameters
    ----------
    store
        Its folder, which need not be there; None for one without.
    fingerprint
        Of the model.

    Raises
    ------
    InputError
        If there is a choice or a verdict that cannot be read.
    """
    choice = read_choice(store, fingerprint)
    if choice is None or choice.codec == RAW:
        return RAW
    verdict = read_verdict(store, fingerprint, choice.codec)
    return choice.codec if verdict is not None and verdict.passed else RAW
