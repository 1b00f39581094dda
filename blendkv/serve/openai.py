"""Requests as OpenAI's clients send them, read strictly: a field that would change the answer is served or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blendkv.engines.base import GenerationOptions
from blendkv.serve.errors import ApiError, unsupported

Read = TypeVar("Read", bound=BaseModel)

_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Fields that say something about a request and nothing about its answer."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": (), "verbosity": (), "web_search_options": (),
}  # fmt: skip
"""Known fields that are not supported here, with the values that ask for nothing; null is one of them."""

_UNION_TAGS = ("str", "bool", "int")
"""Parts that pydantic adds to the place of an error in a union."""


class Retrieval(BaseModel):
    """The field ``blendkv``: which collection to search, how, and whose work it is (see `blendkv.serve.tags`)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    collection: str | bool | None = None
    mode: str | None = None
    k: int | None = Field(None, ge=1)
    where: dict[str, Any] | None = None
    workload: str | None = None
    session: str | None = None


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampling(BaseModel):
    """What chats, completions and RAG queries have in common. Numbers may be ints or floats, nothing else."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    blendkv: Retrieval | None = None

    def options(self, max_tokens: int) -> GenerationOptions:
        """How to decode; greedy and ``max_tokens`` long where the request says nothing."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationOptions(
            self.limit if self.limit is not None else max_tokens,
            0.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            stop,
            self.seed,
        )

    @property
    def limit(self) -> int | None:
        """The longest answer asked for."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(BaseModel):
    """A part of a message that is text."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat; other roles and parts are refused."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """Its words."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def limit(self) -> int | None:
        """``max_completion_tokens`` is the newer name of ``max_tokens``."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(Sampling):
    """``POST /v1/completions``: one prompt, as text or as token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def one(self) -> str | list[int]:
        """The prompt.

        Raises
        ------
        ApiError
            If there are several.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise unsupported("prompt", f"holds {len(prompt)} prompts; one is allowed: send a request for each")
            return prompt[0]
        return prompt  # type: ignore[return-value]


class QueryRequest(Sampling):
    """``POST /v1/rag/query``."""

    question: str
    collection: str | bool | None = True
    mode: str | None = None
    k: int | None = Field(None, ge=1)
    where: dict[str, Any] | None = None


class PostedDocument(BaseModel):
    """A document in the body of ``POST /v1/rag/ingest``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(min_length=1, max_length=1024)
    text: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class IngestRequest(BaseModel):
    """``POST /v1/rag/ingest``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: list[PostedDocument] = Field(min_length=1)
    collection: str | bool | None = True
    precompute: Literal["all", "lazy"] = "all"
    chunk_tokens: int = Field(384, ge=8)


def read(model: type[Read], body: Mapping[str, Any], within: str = "") -> Read:
    """Read a body, or the object in its field ``within``, as ``model``.

    Raises
    ------
    ApiError
        400 with the field that cannot be used, in OpenAI's shape.
    """
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [str(part) for part in first["loc"] if part not in _UNION_TAGS and "[" not in str(part)]
        field = ".".join([within, *parts] if within else parts)
        raise ApiError(400, f"{field}: {first['msg']}", param=field or None, code="invalid_value") from None
    for name, value in (request.model_extra or {}).items():
        _check_extra(name, value)
    return request


def _check_extra(name: str, value: Any) -> None:
    """Refuse a field that is not in the model, unless it asks for nothing."""
    if name in _IGNORED or value is None:
        return
    if name not in _NEUTRAL:
        raise unsupported(name, "is not a field that is known here; leave it out")
    # JSON's true is no 1, although Python's is; 0.0 is 0.
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]):
        allowed = " or ".join(repr(neutral) for neutral in _NEUTRAL[name]) or "nothing"
        raise unsupported(name, f"is {value!r:.60}, which is not supported; allowed: {allowed}")


def split_messages(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """The system messages as one text, and the other messages.

    Raises
    ------
    ApiError
        If the last one is not the user's: it is the question.
    """
    system = "\n\n".join(m.text for m in messages if m.role in ("system", "developer"))
    rest = [m for m in messages if m.role in ("user", "assistant")]
    if not rest or rest[-1].role != "user":
        raise ApiError(400, "the last message must be the user's: it is the question", param="messages")
    return system, rest
