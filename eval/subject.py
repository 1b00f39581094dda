"""What an evaluation measures: a model in an engine, asked and compared in every mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from blendkv.blend import BlendSummary
from blendkv.errors import PromptTooLongError
from blendkv.eval.items import EvalItem, ItemRecord
from blendkv.eval.metrics import ceiling
from blendkv.eval.modes import EvalMode
from blendkv.prompt import INSTRUCTION, PromptBuilder
from blendkv.retrieval.split import tokenise
from blendkv.tokens import text_encoder
from blendkv.types import Prompt, TokenIds, as_token_ids

CONTINUATION = 16
"""Tokens of full prefill's own continuation that modes are compared on."""
_GOLD_TOKENS = 32
"""Most tokens of a gold answer that modes are compared on."""


@dataclass(frozen=True)
class Built:
    """An item as a prompt: its chunks, the gold answer's first tokens, and what is written down of it."""

    prompt: Prompt
    chunks: tuple[TokenIds, ...]
    gold: TokenIds
    max_new_tokens: int
    record: ItemRecord


@dataclass(frozen=True)
class Truth:
    """Full prefill's greedy answer; ``state`` is the subject's own: what it compares other modes with."""

    token_ids: tuple[int, ...]
    text: str
    state: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Comparison:
    """How close a mode is to full prefill on one prompt; see `blendkv.eval.items.Result` for the figures.

    For an exact mode they are the rounding of the engine. What the engine does not show is None.
    """

    kl: float
    kl_first: float | None
    kl_gold: float | None
    top1: float
    report: BlendSummary | None = None
    selected: list[list[int]] | None = None
    deviation: dict[str, list[float]] | None = None


@dataclass(frozen=True)
class Asked:
    """An answer in a mode: seconds from the call to the first token, and where they went."""

    token_ids: tuple[int, ...]
    text: str
    ttft_s: float
    stages_s: dict[str, float]
    report: BlendSummary | None = None
    fallback: str | None = None
    predicted_s: dict[str, float] | None = None


class Subject(Protocol):
    """A model in an engine. One thread; close it."""

    engine_name: str
    model: str
    fingerprint: str
    dtype: str
    codec: str
    layers: int
    context: int
    tokenizer: Any
    builder: PromptBuilder

    def prepare(self, built: Built) -> None:
        """Compute and store the chunk KVs of a prompt."""

    def truth(self, built: Built) -> Truth:
        """Prefill in full, by the engine's own attention, and answer greedily."""

    def compare(self, built: Built, mode: EvalMode, truth: Truth, deviation: bool = False) -> Comparison:
        """Compare a mode's distributions with full prefill's, teacher-forced on its continuation and the gold answer.

        Raises
        ------
        InputError
            If the mode cannot run on this prompt, such as a budget below its rule's floor.
        """

    def ask(self, built: Built, mode: EvalMode, max_new_tokens: int) -> Asked:
        """Answer greedily, as a user would ask, and time the first token."""

    def budget_one(self, built: Built, truth: Truth) -> float:
        """KL to full prefill with every token recomputed: correctness is red when this is more than rounding.

        That includes what a codec with losses did to a chunk that would be exact where it stands.
        """

    def close(self) -> None:
        """Release the model."""


def build(subject: Subject, item: EvalItem, chunks: int | None = None) -> Built:
    """The prompt of an item: its first ``chunks`` passages, fewer when the model's context has no room for them.

    Raises
    ------
    PromptTooLongError
        If not even one passage fits.
    """
    kept = [tokenise(subject.tokenizer, text, item.id) for text in item.contexts[:chunks]]
    instruction = INSTRUCTION if item.instruction is None else item.instruction
    room = subject.context - max(item.max_new_tokens, CONTINUATION, _GOLD_TOKENS) - 1
    while True:
        ids = tuple(c[0] for c in kept)
        prompt = subject.builder.first(ids, item.question, instruction)
        if len(prompt) <= room:
            break
        if len(kept) <= 1:
            raise PromptTooLongError(
                f"{item.id}: its first passage and the question have {len(prompt)} tokens, {room} fit into the context "
                f"of {subject.model} ({subject.context}) beside the answer: cut the passages"
            )
        kept.pop()
    gold = as_token_ids(text_encoder(subject.tokenizer).encode(item.answers[0], plain=True)[:_GOLD_TOKENS])
    texts = item.contexts[: len(kept)]
    pieces = [_pieces(text, spans) for text, (_, spans) in zip(texts, kept, strict=True)]
    record = ItemRecord(
        item.id, item.task, item.question, list(item.answers), pieces, len(item.contexts) - len(kept),
        ceiling(item.answers, texts, item.meta.get("parts", ())), dict(item.meta),
    )  # fmt: skip
    return Built(prompt, ids, gold, item.max_new_tokens, record)


def _pieces(text: str, spans: Any) -> list[str]:
    """The text of every token; what lies between two spans goes with the first, a shared character with its last."""
    starts = [int(s) for s in spans[:, 0]]
    starts[0] = 0
    ends = [*starts[1:], len(text)]
    return [text[a:b] for a, b in zip(starts, ends, strict=True)]


def offsets_by_chunk(prompt: Prompt, selected: Sequence[int]) -> list[list[int]]:
    """Absolute positions as offsets within each of the prompt's chunks."""
    found: list[list[int]] = []
    start = 0
    for segment in prompt.segments:
        stop = start + len(segment.token_ids)
        if segment.kind == "chunk":
            found.append([p - start for p in selected if start <= p < stop])
        start = stop
    return found
