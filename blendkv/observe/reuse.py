"""What became of one request's prompt, in the few words and figures that metrics, headers and bodies share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from blendkv.answer import Answer

OutcomeName = Literal["blended", "prefix", "full", "fallback", "plain", "error", "cancelled"]
OUTCOMES: tuple[OutcomeName, ...] = ("blended", "prefix", "full", "fallback", "plain", "error", "cancelled")

_OTHER = "other"
_MOST_REASONS = 32


@dataclass(frozen=True)
class Reuse:
    """How a prompt was computed.

    Attributes
    ----------
    name
        ``blended``: chunk KVs were reused. ``prefix``: nothing but the prompt's beginning was. ``full``: all of it was
        prefilled, as asked. ``fallback``: all of it was prefilled although a blend was asked for. ``plain``: a request
        without retrieval. ``error`` and ``cancelled``: there is no answer.
    mode
        The mode that was carried out.
    reason
        Why a blend became a full prefill; None otherwise.
    reused, recomputed, fresh
        Tokens of the prompt whose stored KV was used as it is, was computed again, and that had none. They add up to
        the prompt; all are 0 where the engine does not tell: its own prefix cache served it.
    budget_asked, budget_spent
        Of the blend; see `blendkv.blend.BlendReport`. None without one.
    """

    name: OutcomeName
    mode: str
    reason: str | None = None
    reused: int = 0
    recomputed: int = 0
    fresh: int = 0
    budget_asked: float | None = None
    budget_spent: float | None = None

    @classmethod
    def of(cls, answer: Answer, plain: bool = False) -> Reuse:
        """Read it off an answer; ``plain`` for a request without retrieval."""
        report = answer.blend_report
        if report is None:
            if answer.mode == "prefix":  # the engine's own cache was enough, and does not tell how much it had
                return cls("prefix", answer.mode)
            if answer.mode != "full":  # blended, without a report
                return cls("blended", answer.mode, answer.fallback)
            name: OutcomeName = "fallback" if answer.fallback else "plain" if plain else "full"
            return cls(name, answer.mode, answer.fallback, fresh=answer.prompt_tokens)
        recomputed = report.recomputed_tokens
        reused = report.total_tokens - report.fresh_tokens - recomputed
        name = "blended" if report.reusable_tokens else "prefix"
        fresh = answer.prompt_tokens - reused - recomputed  # what stands behind the blended part is fresh too
        return cls(
            name, answer.mode, answer.fallback, reused, recomputed, fresh, report.budget_asked, report.budget_spent
        )  # fmt: skip


class Reasons:
    """Turns the text of a reason into a label of which there are few.

    Short reasons are taken as they are, until there are 32 of them; sentences are known by their words, or ``other``.
    """

    _KNOWN = (
        ("are damaged", "damaged_chunk"), ("use full prefill", "unsupported_model"), ("the quality gate", "gate"),
    )  # fmt: skip

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def label(self, reason: str | None) -> str:
        """The label; empty without a reason."""
        if reason is None:
            return ""
        if re.fullmatch(r"[A-Za-z][\w -]{0,39}", reason):
            short = re.sub(r"[^a-z0-9]+", "_", reason.lower())
            if short in self._seen or len(self._seen) < _MOST_REASONS:
                self._seen.add(short)
                return short
        return next((label for word, label in self._KNOWN if word in reason), _OTHER)
