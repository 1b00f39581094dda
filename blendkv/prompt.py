"""Chat template + chunks + question -> a prompt of segments, each with its token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blendkv.errors import InputError
from blendkv.tokens import text_encoder
from blendkv.types import Prompt, Segment, TokenIds, as_token_ids

DEFAULT_SYSTEM = "You answer questions from the passages that you are given."
INTRODUCTION = "Read these passages.\n\n"
INSTRUCTION = "Answer the question from the passages above, in a few words. Do not repeat the question."
"""Stands behind the passages, where it is always computed fresh: a task named only before them blends worse."""

_log = logging.getLogger(__name__)
_MARK = "\u2063blendkv\u2063"


@dataclass(frozen=True)
class Turn:
    """What one side of a conversation said."""

    role: Literal["user", "assistant"]
    text: str


class PromptBuilder:
    """Builds prompts of one shape: system prefix, chunks one after the other, question, generation prompt.

    The template is rendered once and cut at a mark where the user's words belong: what stands before it is the
    ``system`` segment, what stands after it closes the ``query``. Chunks carry their own token ids and their own
    trailing blank lines, so nothing is put between them.

    Parameters
    ----------
    tokenizer
        A fast transformers tokenizer; without a chat template a plain layout is used.
    system
        The system message; part of the recipe of ``system`` chunk KVs.
    """

    def __init__(self, tokenizer: Any, system: str = DEFAULT_SYSTEM) -> None:
        self._tokenizer = tokenizer
        self.system = system
        before, self._after = self._frame()
        ids = self.encode(before)
        bos = tokenizer.bos_token_id
        if getattr(tokenizer, "chat_template", None) is None and bos is not None:
            ids = [bos, *ids]
        self.prefix = as_token_ids(ids)
        """Token ids of the system segment."""

    def _frame(self) -> tuple[str, str]:
        """The texts before and after the user's words."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return f"{self.system}\n\n{INTRODUCTION}" if self.system else INTRODUCTION, "\n\nAnswer:"
        words = f"{INTRODUCTION}{_MARK}"
        try:
            text = self._render([{"role": "system", "content": self.system}, {"role": "user", "content": words}])
        except Exception as error:  # templates refuse a system role with an error of their own (Gemma)
            _log.info("the chat template refuses a system message, it goes into the user's: %s", error)
            text = ""
        if self.system.strip() not in text or not text:  # refused, or dropped without a word
            words = f"{self.system}\n\n{words}" if self.system else words
            try:
                text = self._render([{"role": "user", "content": words}])
            except Exception as error:
                raise InputError(f"the model's chat template cannot be rendered ({error}); mend it") from error
        if text.count(_MARK) != 1:
            raise InputError("the model's chat template does not keep the user's message as it is; it cannot be used")
        before, after = text.split(_MARK)
        return before, after

    def _render(self, turns: Sequence[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def encode(self, text: str, plain: bool = False) -> list[int]:
        """Token ids of a part of the template; ``plain`` text may spell special tokens without meaning them."""
        return text_encoder(self._tokenizer).encode(text, plain=plain)

    def _question(self, question: str, instruction: str = INSTRUCTION) -> Segment:
        if not question.strip():
            raise InputError("the question is empty; ask something")
        _check_unicode(question, "the question")
        asked = self.encode(f"{instruction}\nQuestion: {question.strip()}", plain=True)
        return Segment("query", as_token_ids([*asked, *self.encode(self._after)]))

    def first(self, chunks: Sequence[TokenIds], question: str, instruction: str = INSTRUCTION) -> Prompt:
        """The prompt of a first turn; ``instruction`` says what to do with the passages."""
        segments = [Segment("system", self.prefix)] if len(self.prefix) else []
        segments += [Segment("chunk", c) for c in chunks]
        return Prompt((*segments, self._question(question, instruction)))

    def next(self, chunks: Sequence[TokenIds], question: str) -> Prompt:
        """The prompt of a later turn, to stand behind the blended history: end of the last answer, chunks, question."""
        opening = self._opening() + (INTRODUCTION if chunks else "")
        before = [Segment("history", as_token_ids(self.encode(opening)))] if opening else []
        return Prompt((*before, *(Segment("chunk", c) for c in chunks), self._question(question)))

    def conversation(
        self, chunks: Sequence[TokenIds], earlier: Sequence[Turn], question: str, system: str | None = None
    ) -> Prompt:
        """The prompt of a whole conversation whose last question has passages.

        The passages stand right behind the system prefix, where they stand in a first turn too, so that their KV is
        as good there; the earlier turns follow them as one ``history`` segment, then comes the question.

        Parameters
        ----------
        chunks
            Passages for the question.
        earlier
            The turns before it. Turns of one side in a row are joined.
        question
            The last user's words.
        system
            Another system message than the store's. Chunk KVs were computed behind the store's own, which stays in
            front; this one is put behind the passages, where it is computed fresh.

        Raises
        ------
        InputError
            If the question is empty, a text is no valid Unicode, or the chat template does not keep earlier turns.
        """
        turns = _alternating(earlier)
        own = "" if system is None or system.strip() in ("", self.system.strip()) else f"{system.strip()}\n\n"
        _check_unicode(own, "the system message")
        history = self.encode(own, plain=True) if own else []
        answered = len(turns) - len(turns) % 2
        # A user's turn that was not answered opens the turn of the question.
        for turn, glue in zip(turns, [*self._glue(answered), "\n\n"], strict=False):
            _check_unicode(turn.text, f"a turn of the {turn.role}")
            words = f"Question: {turn.text.strip()}" if turn.role == "user" and turn.text.strip() else turn.text
            history += [*self.encode(words, plain=True), *self.encode(glue)]
        first = self.first(chunks, question)
        if not history:
            return first
        return Prompt((*first.segments[:-1], Segment("history", as_token_ids(history)), first.segments[-1]))

    def _glue(self, turns: int) -> list[str]:
        """The template's texts behind each of ``turns`` turns; a question follows the last one."""
        if turns == 0:
            return []
        if getattr(self._tokenizer, "chat_template", None) is None:
            return [self._after, "\n\n"] * (turns // 2)
        roles = ("user", "assistant")
        try:  # without the system message: some templates put it into the last user's turn
            text = self._render([{"role": roles[i % 2], "content": _MARK} for i in range(turns + 1)])
        except Exception as error:
            raise InputError(f"the model's chat template refuses a conversation ({error}); ask one question") from error
        parts = text.split(_MARK)
        if len(parts) != turns + 2:
            raise InputError("the model's chat template does not keep earlier turns as they are; ask one question")
        return parts[1:-1]

    def _opening(self) -> str:
        """The text between an answer and the next user's words."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return "\n\n"
        turns = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": _MARK},
        ]
        parts = self._render(turns).split(_MARK)
        if len(parts) != 3:
            raise InputError("the model's chat template does not keep earlier turns as they are; chat() cannot be used")
        return parts[1]


def _alternating(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with those of one side joined, beginning with the user's."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and joined[-1].role == turn.role:
            joined[-1] = Turn(turn.role, f"{joined[-1].text}\n\n{turn.text}")
        else:
            joined.append(turn)
    before = [Turn("user", "")] if joined and joined[0].role == "assistant" else []
    return [*before, *joined]


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{what} holds a lone surrogate; valid Unicode is allowed: mend it") from None
