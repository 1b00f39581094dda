"""Bodies and headers of answers, as OpenAI's clients read them, with what the blend did in a field of its own."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from blendkv.answer import Answer
from blendkv.observe.reuse import Reuse
from blendkv.serve.prompting import passage
from blendkv.serve.running import Running
from blendkv.serve.tags import Tag


def finish_reason(answer: Answer) -> str:
    """``stop`` or ``length``, the words that OpenAI's clients know."""
    return "length" if answer.finish_reason == "length" else "stop"


def usage(answer: Answer, reuse: Reuse) -> dict[str, Any]:
    """Token counts; prompt tokens whose KV was taken from the store are the cached ones."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reuse.reused},
    }


@dataclass(frozen=True)
class Telemetry:
    """What a response tells: whose work it was and how long it waited; of reuse, where a collection was searched."""

    collection: str | None
    mode: str
    tag: Tag

    def reuse(self, answer: Answer) -> Reuse:
        """How the prompt was computed."""
        return Reuse.of(answer, plain=self.collection is None)

    def early_headers(self, running: Running) -> dict[str, str]:
        """Headers that are known before the answer."""
        waited = {"X-BlendKV-Queued-Seconds": f"{running.queued:.3f}"}
        if running.queued_for:
            waited["X-BlendKV-Queued-For"] = running.queued_for
        searched = {}
        if self.collection is not None:
            searched = {"X-BlendKV-Collection": self.collection, "X-BlendKV-Mode": self.mode}
        return {**self.tag.headers(), **waited, **searched}

    def headers(self, running: Running) -> dict[str, str]:
        """All headers."""
        answer = running.answer
        if self.collection is None or answer is None:
            return self.early_headers(running)
        reuse = self.reuse(answer)
        spent = {} if reuse.budget_spent is None else {"X-BlendKV-Budget-Spent": f"{reuse.budget_spent:.6f}"}
        return {
            **self.early_headers(running),
            "X-BlendKV-Mode": reuse.mode,
            "X-BlendKV-Outcome": reuse.name,
            "X-BlendKV-Tokens-Reused": str(reuse.reused),
            "X-BlendKV-Tokens-Recomputed": str(reuse.recomputed),
            "X-BlendKV-Tokens-Fresh": str(reuse.fresh),
            "X-BlendKV-Sources": str(len(answer.sources)),
            **spent,
        }

    def body(self, running: Running, texts: bool = False) -> dict[str, Any]:
        """The field ``blendkv`` of a body; nothing for a plain request."""
        answer = running.answer
        if self.collection is None or answer is None:
            return {}
        reuse = self.reuse(answer)
        return {
            "blendkv": {
                "collection": self.collection,
                "mode": reuse.mode,
                "outcome": reuse.name,
                "reason": reuse.reason,
                "tokens": {"reused": reuse.reused, "recomputed": reuse.recomputed, "fresh": reuse.fresh},
                "budget_asked": reuse.budget_asked,
                "budget_spent": reuse.budget_spent,
                "sources": [passage(source, texts) for source in answer.sources],
                "workload": self.tag.workload,
                "queued_for": running.queued_for or None,
                "seconds": {"queue": running.queued, **answer.timings},
            }
        }


@dataclass(frozen=True)
class Shape:
    """The shape of one endpoint's bodies: a chat's, or a completion's."""

    chat: bool
    id: str
    model: str
    created: int

    @classmethod
    def make(cls, chat: bool, request_id: str, model: str) -> Shape:
        """A shape with an id of the request's and the time of now."""
        return cls(chat, f"{'chatcmpl' if chat else 'cmpl'}-{request_id}", model, int(time.time()))

    def whole(self, running: Running, telemetry: Telemetry) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        answer = running.answer
        assert answer is not None
        words = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason(answer)}
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [{**choice, **(words if self.chat else {"text": answer.text})}],
            "usage": usage(answer, telemetry.reuse(answer)),
            **telemetry.body(running),
        }

    def opening(self, counted: bool) -> list[str]:
        """What a stream begins with: the role, in a chat."""
        return [self._event({"role": "assistant", "content": ""}, counted)] if self.chat else []

    def piece(self, text: str, counted: bool) -> str:
        """A piece of text; ``counted`` streams carry the field ``usage`` in every event."""
        return self._event({"content": text} if self.chat else text, counted)

    def ending(self, running: Running, telemetry: Telemetry, counted: bool) -> list[str]:
        """What a stream ends with: why, what the blend did, and the usage if asked for."""
        answer = running.answer
        assert answer is not None
        nothing: Any = {} if self.chat else ""
        events = [self._event(nothing, counted, finish_reason(answer), telemetry.body(running))]
        if counted:
            head = self._head("chat.completion.chunk" if self.chat else "text_completion")
            events.append(_data({**head, "choices": [], "usage": usage(answer, telemetry.reuse(answer))}))
        return [*events, "data: [DONE]\n\n"]

    def _event(self, words: Any, counted: bool, finish: str | None = None, more: dict[str, Any] | None = None) -> str:
        choice = {"index": 0, "logprobs": None, "finish_reason": finish, "delta" if self.chat else "text": words}
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return _data({**head, "choices": [choice], **({"usage": None} if counted else {}), **(more or {})})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _data(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
