"""The OpenAI-compatible endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blendkv.answer import AnswerStream
from blendkv.serve.backends import Backends
from blendkv.serve.errors import ApiError
from blendkv.serve.openai import ChatRequest, CompletionRequest, Retrieval, Sampling, read
from blendkv.serve.passing import Passed, forwarded
from blendkv.serve.prompting import Question, ask, chat_plain, complete_plain, mode_of
from blendkv.serve.replies import Shape, Telemetry
from blendkv.serve.service import Service, json_body
from blendkv.serve.tags import tag_of


def openai_routes(service: Service) -> APIRouter:
    """``/v1/models``, ``/v1/chat/completions`` and ``/v1/completions``."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_card(name) for name in service.backends_of(request).models]})

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> JSONResponse:
        service.backends_of(request).target(name, None)  # refuses unknown names
        return JSONResponse(_card(name))

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await json_body(request)
        backends, client = service.backends_of(request), request.state.client
        target, retrieval = _aim(backends, body)
        tag = tag_of(request.headers, body, target is not None, client.tenant)
        if target is None and backends.plain is not None:
            handed_on = forwarded(await request.body(), body, backends.model, client.tenant)
            turn = service.door.turn(tag.use, tag.tenant)
            return Passed(backends.plain, handed_on, service.metrics, turn, tag.headers())
        asked = read(ChatRequest, body)
        options = asked.options(service.settings.max_tokens)
        if target is None:
            pipeline = next(iter(backends.stores.values()))
            start: Callable[[], AnswerStream] = partial(chat_plain, pipeline, asked.messages, options)
            return await _respond(service, request, asked, start, Telemetry(None, "full", tag))
        pipeline = backends.stores[target]
        mode = mode_of(pipeline, retrieval.mode)
        start = partial(ask, pipeline, Question.of(asked.messages), mode, retrieval, options)
        return await _respond(service, request, asked, start, Telemetry(target, str(mode), tag))

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await json_body(request)
        backends, client = service.backends_of(request), request.state.client
        target, retrieval = _aim(backends, body)
        tag = tag_of(request.headers, body, target is not None, client.tenant)
        if target is None and backends.plain is not None:
            handed_on = forwarded(await request.body(), body, backends.model, client.tenant)
            turn = service.door.turn(tag.use, tag.tenant)
            return Passed(backends.plain, handed_on, service.metrics, turn, tag.headers())
        asked = read(CompletionRequest, body)
        options = asked.options(service.settings.max_tokens)
        if target is None:
            pipeline = next(iter(backends.stores.values()))
            start: Callable[[], AnswerStream] = partial(complete_plain, pipeline, asked.one, options)
            return await _respond(service, request, asked, start, Telemetry(None, "full", tag))
        pipeline, question = backends.stores[target], asked.one
        if not isinstance(question, str):
            raise ApiError(400, "a prompt of token ids cannot be searched for; give text, or no collection",
                           param="prompt")  # fmt: skip
        mode = mode_of(pipeline, retrieval.mode)
        start = partial(ask, pipeline, Question(question), mode, retrieval, options)
        return await _respond(service, request, asked, start, Telemetry(target, str(mode), tag))

    return router


def _aim(backends: Backends, body: dict[str, Any]) -> tuple[str | None, Retrieval]:
    """The store that a request means, None for none, and how to search it; the rest of the body is not read yet."""
    model, field = body.get("model", ""), body.get("blendkv")
    if not isinstance(model, str):
        raise ApiError(400, f"model is a JSON {type(model).__name__}; a string is allowed", param="model")
    if field is not None and not isinstance(field, dict):
        raise ApiError(400, f"blendkv is a JSON {type(field).__name__}; an object is allowed", param="blendkv")
    retrieval = read(Retrieval, field or {}, "blendkv")
    asks = {name for name in ("mode", "k", "where") if getattr(retrieval, name) is not None}
    target = backends.target(model, retrieval.collection)
    if target is None and asks:
        raise ApiError(400, f"blendkv has {', '.join(sorted(asks))} and no collection; add one, or true for "
                       f"{backends.default!r}", param="blendkv.collection")  # fmt: skip
    return target, retrieval


async def _respond(
    service: Service, request: Request, asked: Sampling, start: Callable[[], AnswerStream], telemetry: Telemetry
) -> Response:
    chat = isinstance(asked, ChatRequest)
    shape = Shape.make(chat, request.state.request_id, asked.model or service.backends.model)
    if asked.stream:
        return await service.stream(request, start, shape, telemetry, asked.include_usage)
    return await service.whole(request, start, shape, telemetry)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "blendkv"}
