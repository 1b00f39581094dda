"""The quality gate's verdict on a model, as a store keeps it; without one, blending is allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from blendkv.errors import InputError

FOLDER = "gate"
FORMAT = 1


@dataclass(frozen=True)
class Verdict:
    """Whether blending is close enough to full prefill for a model, and what was measured, in one line."""

    passed: bool
    summary: str


def verdict_path(store: Path, fingerprint: str) -> Path:
    """Where a store keeps the verdict on a model."""
    return store / FOLDER / f"{fingerprint}.json"


def read_verdict(store: Path, fingerprint: str) -> Verdict | None:
    """The verdict on a model; None if it was not measured.

    Raises
    ------
    InputError
        If the file does not hold a verdict of a known format.
    """
    path = verdict_path(store, fingerprint)
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not isinstance(found["passed"], bool):
            raise ValueError(f"format {found['format']}, passed {found['passed']!r}")
        return Verdict(found["passed"], str(found["summary"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} holds no gate verdict of format {FORMAT} ({error}); remove it, or measure the model again"
        ) from error
