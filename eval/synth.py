"""Generated items: seeded, no download, with answers that stand in the documents and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields

from blendkv.errors import InputError
from blendkv.eval.items import EvalItem
from blendkv.eval.synth_kinds import GENERAL_KNOBS, KINDS, Difficulty

MIXED = "mixed"
"""The spec of all kinds in turn."""
DEFAULT_COUNT = 48


def generate(kinds: Sequence[str], count: int, seed: int = 0, difficulty: Difficulty | None = None) -> list[EvalItem]:
    """Make ``count`` items, the kinds in turn. The same arguments give the same items, in every process.

    A question's documents stand in ``contexts``, each a title, a line break and prose. ``meta`` holds ``kind``,
    ``support`` (indices of the documents that the answer needs) and what the kind tells of itself: ``hops`` and
    ``chain``, ``parts`` (all of which make up the answer), ``key``, ``values``.

    Parameters
    ----------
    kinds
        Of ``chain``, ``needles``, ``lookup``, ``updates``.
    count
        Number of items.
    seed
        Any whole number.
    difficulty
        Knobs; None for each kind's defaults.

    Raises
    ------
    InputError
        If a kind is unknown, none is named, one has no such knob, or ``count`` is below 1.
    """
    difficulty = difficulty or Difficulty()
    if not kinds or count < 1:
        raise InputError(f"{count} generated items of {len(kinds)} kinds; one of each or more is needed")
    for kind in kinds:
        unread = difficulty.given() - GENERAL_KNOBS - set(KINDS.get(kind).defaults)
        if unread:
            raise InputError(
                f"{kind} has no {', '.join(sorted(unread))}; its knobs: {', '.join(sorted(_knobs(kind)))}; "
                "leave the knob or the kind out"
            )
    items = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        # Seeds of text are hashed by SHA-512, which is the same in every process.
        draft = KINDS.get(kind).draft(random.Random(f"{seed}-{kind}-{number}"), difficulty)
        meta = {"kind": kind, "support": list(draft.support), **draft.meta}
        items.append(
            EvalItem(
                id=f"synth-{number:04d}",
                question=draft.question,
                answers=draft.answers,
                contexts=draft.contexts,
                max_new_tokens=draft.max_new_tokens,
                meta=meta,
            )
        )
    return items


def parse_spec(spec: str) -> tuple[list[str], Difficulty]:
    """Read a spec such as ``mixed``, ``needles``, ``chain,hops=3,distractors=8`` or ``hops=2``.

    Kinds and knobs are separated by commas. Without a kind, all kinds are meant that have one of the knobs named
    for some of them only, such as ``hops``; without such a knob, all.

    Raises
    ------
    InputError
        If a part is neither a kind nor a knob with its number.
    """
    kinds: list[str] = []
    knobs: dict[str, int] = {}
    allowed = [f.name for f in fields(Difficulty)]
    for part in filter(None, (p.strip() for p in spec.split(","))):
        name, sign, value = (p.strip() for p in part.partition("="))
        if not sign and name in (MIXED, *KINDS.names()):
            kinds += KINDS.names() if name == MIXED else [name]
        elif sign and name in allowed and value.isascii() and value.isdecimal():
            knobs[name] = int(value)
        else:
            raise InputError(
                f"{part!r} in the spec {spec!r} of generated items; allowed, with commas between: "
                f"{', '.join((MIXED, *KINDS.names()))}, and {', '.join(f'{k}=N' for k in allowed)}"
            )
    own = set(knobs) - GENERAL_KNOBS
    if not kinds:
        kinds = [k for k in KINDS.names() if not own or own & _knobs(k)]
    return list(dict.fromkeys(kinds)), Difficulty(**knobs)


def _knobs(kind: str) -> frozenset[str]:
    return GENERAL_KNOBS | set(KINDS.get(kind).defaults)
