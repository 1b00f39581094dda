"""From a request's words to a stream of an engine: with passages of a collection, or plain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blendkv.answer import AnswerStream
from blendkv.blend import Mode, parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.errors import InputError, PromptTooLongError
from blendkv.pipeline import RagPipeline
from blendkv.prompt import Turn
from blendkv.retrieval.retriever import RetrievedChunk
from blendkv.serve.errors import ApiError
from blendkv.serve.openai import Message, Retrieval, split_messages
from blendkv.tokens import text_encoder
from blendkv.types import Prompt, Segment, as_token_ids


@dataclass(frozen=True)
class Question:
    """A question to a collection, with the conversation before it."""

    text: str
    earlier: tuple[Turn, ...] = ()
    system: str | None = None

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Question:
        """The last user's message is the question; the system message and the earlier turns are kept.

        Raises
        ------
        ApiError
            If the last message is not the user's.
        """
        system, turns = split_messages(messages)
        *before, last = turns
        earlier = tuple(Turn("user" if m.role == "user" else "assistant", m.text) for m in before)
        return cls(last.text, earlier, system or None)


def mode_of(pipeline: RagPipeline, given: str | None, field: str = "blendkv.mode") -> Mode:
    """The mode that a request names in ``field``, or the pipeline's.

    Raises
    ------
    ApiError
        400 if it is none.
    """
    try:
        return pipeline.mode if given is None else parse_mode(given)
    except InputError as error:
        raise ApiError(400, str(error), param=field, code="invalid_value") from None


def ask(
    pipeline: RagPipeline, question: Question, mode: Mode, retrieval: Retrieval, options: GenerationOptions
) -> AnswerStream:
    """Retrieve, put the passages behind the store's own system prefix, blend, and decode. Blocks.

    Raises
    ------
    ApiError
        413 if the prompt exceeds the context, with what would fit; 503 while a first ingest has nothing to search yet.
    InputError, StoreError
        As `RagPipeline.stream`.
    """
    began = time.perf_counter()
    k = pipeline.top_k if retrieval.k is None else retrieval.k
    try:
        sources = pipeline.retriever.retrieve(question.text, k, retrieval.where)
    except InputError as error:
        if _half_ingested(pipeline):
            message = "the collection is being ingested for the first time; come again"
            raise ApiError(503, message, kind="service_unavailable", code="not_ready") from error
        raise
    timings = {"retrieve": time.perf_counter() - began}
    chunks = [source.chunk.token_ids for source in sources]
    prompt = pipeline.prompts.conversation(chunks, question.earlier, question.text, question.system)
    try:
        return pipeline.answer(prompt, mode, sources, options, began=began, timings=timings)
    except PromptTooLongError as error:
        raise _too_long(pipeline, prompt, sources, error) from error


def _half_ingested(pipeline: RagPipeline) -> bool:
    """Whether a first ingest has written chunks and has not embedded any yet."""
    if pipeline.collection is None:
        return False
    counts = pipeline.collection.counts()
    return counts.chunks > 0 and counts.embedded == 0


def _too_long(
    pipeline: RagPipeline, prompt: Prompt, sources: Sequence[RetrievedChunk], error: PromptTooLongError
) -> ApiError:
    """Say how many passages would fit beside the rest, leaving room for one token at least."""
    sizes = [len(source.chunk.token_ids) for source in sources]
    room = pipeline.engine.context - 1 - (len(prompt) - sum(sizes))
    fitting = 0
    for size in sizes:
        room -= size
        if room < 0:
            break
        fitting += 1
    suggestion: dict[str, Any] = {"blendkv": {"k": fitting}} if fitting else {"messages": "shorten the conversation"}
    advice = f"blendkv.k = {fitting} would fit" if fitting else "shorten the conversation or the question"
    return ApiError(
        413, f"{error}; over HTTP: {advice}", param="messages", code="context_length_exceeded", suggestion=suggestion
    )


def chat_plain(pipeline: RagPipeline, messages: Sequence[Message], options: GenerationOptions) -> AnswerStream:
    """Answer a chat as the model's own template renders it, without retrieval. Blocks.

    Raises
    ------
    ApiError
        400 if the model has no chat template, or its template refuses the messages.
    """
    tokenizer = pipeline.engine.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        raise ApiError(400, "the model has no chat template; use /v1/completions, or name a collection", param="model")
    turns = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in messages]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates refuse messages with errors of their own
        raise ApiError(400, f"the model's chat template refuses these messages: {error}", param="messages") from error
    return _plain(pipeline, text_encoder(tokenizer).encode(text), options)


def complete_plain(pipeline: RagPipeline, prompt: str | list[int], options: GenerationOptions) -> AnswerStream:
    """Continue a text, or token ids, without retrieval. Blocks.

    Raises
    ------
    ApiError
        400 if the prompt is empty or holds a token id that the model does not know.
    """
    tokenizer = pipeline.engine.tokenizer
    ids = text_encoder(tokenizer).encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    unknown = [i for i in ids if not 0 <= i < len(tokenizer)]
    if unknown or not ids:
        why = f"holds token id {unknown[0]}; 0 to {len(tokenizer) - 1} are allowed" if unknown else "is empty"
        raise ApiError(400, f"prompt {why}", param="prompt", code="invalid_value")
    return _plain(pipeline, ids, options)


def _plain(pipeline: RagPipeline, ids: Sequence[int], options: GenerationOptions) -> AnswerStream:
    return pipeline.answer(Prompt((Segment("query", as_token_ids(ids)),)), parse_mode("full"), (), options)


def passage(source: RetrievedChunk, text: bool = False) -> Mapping[str, Any]:
    """A source for a response's body, with its text if asked for."""
    chunk = source.chunk
    found = {"id": chunk.id, "document": chunk.document_id, "score": source.score, "metadata": dict(chunk.metadata)}
    return {**found, "text": chunk.text} if text else found
