"""Runs requests on the engine: queue, threads, disconnected clients, and the counting of it all."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blendkv.answer import AnswerStream
from blendkv.blend import parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.errors import BlendKVError
from blendkv.observe.collectors import CodecCollector
from blendkv.observe.metrics import Metrics
from blendkv.observe.tracing import carried, current
from blendkv.pipeline import RagPipeline
from blendkv.serve.backends import Backends
from blendkv.serve.door import Door
from blendkv.serve.errors import ApiError, translate
from blendkv.serve.replies import Shape, Telemetry
from blendkv.serve.running import Running
from blendkv.serve.settings import ServeSettings
from blendkv.serve.stream import EventStream, error_event
from blendkv.serve.tags import Tag
from blendkv.store.timing import CODEC_TIMINGS
from blendkv.types import Prompt, Segment, as_token_ids

Result = TypeVar("Result")
_SPARE_THREADS = 4
_WARM_UP_TOKENS = 256
_log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


class Service:
    """What the routes share.

    Parameters
    ----------
    backends, settings
        Who answers, and within which limits.

    Attributes
    ----------
    metrics
        Of this server.
    stopping
        Set when the grace time is over: long jobs on threads look at it.
    """

    def __init__(self, backends: Backends, settings: ServeSettings) -> None:
        self.backends, self.settings = backends, settings
        self.metrics = Metrics(backends.facts)
        self.metrics.include(CodecCollector(CODEC_TIMINGS.read))
        if backends.registry is not None:
            self.metrics.include(backends.registry)
        self._executor = ThreadPoolExecutor(settings.max_requests + _SPARE_THREADS, thread_name_prefix="blendkv-serve")
        slots = settings.slots or (1 if backends.serial else settings.max_requests)
        self.door = Door(settings.admission(slots), self.metrics)
        self._views = {client: backends.of(client) for client in settings.keys.values()}
        self.stopping = threading.Event()

    def backends_of(self, request: Request) -> Backends:
        """What the client of a request may use."""
        return self._views.get(request.state.client, self.backends)

    def everybodys(self, store: str) -> list[RagPipeline]:
        """The pipelines of all tenants over a store."""
        views = (self.backends, *self._views.values())
        return [view.stores[store] for view in views if store in view.stores]

    async def thread(self, call: Callable[[], Result]) -> Result:
        """Run a blocking call on a thread of the server's."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, carried(call))

    def warm_up(self) -> None:
        """Load what is loaded at first use, and measure what a full prefill takes here. Blocks.

        What fails is logged: it will fail again, and be said, when it is asked for.
        """
        for name, pipeline in self.backends.stores.items():
            try:
                pipeline.retriever.retrieve("warm-up", 1)
            except BlendKVError as error:
                _log.warning("the collection %r cannot be searched: %s", name, error)
        pipeline = next(iter(self.backends.stores.values()))
        tokens = min(_WARM_UP_TOKENS, pipeline.engine.context // 2)
        for seed in (0, 1):  # other tokens each time, so that no cache helps; the first run is a slow one
            ids = np.random.default_rng(seed).integers(0, len(pipeline.engine.tokenizer), tokens)
            prompt = Prompt((Segment("query", as_token_ids(ids)),))
            answer = pipeline.answer(prompt, parse_mode("full"), (), GenerationOptions(max_new_tokens=1)).answer
        self.metrics.prefilled(tokens, answer.timings["ttft"])

    def running(self, start: Callable[[], AnswerStream], tag: Tag) -> Running:
        """An answer in the making; see `Running`."""
        return Running(start, self._executor, self.door.turn(tag.use, tag.tenant), tag.use)

    async def answer(self, request: Request, start: Callable[[], AnswerStream], telemetry: Telemetry) -> Running:
        """Run a request to its end and count it.

        Raises
        ------
        ClientGoneError
            If the client left; the engine is told to stop.
        BlendKVError, ApiError
            From ``start``.
        """
        running = self.running(start, telemetry.tag)

        async def read() -> None:
            async with aclosing(running.pieces()) as pieces:
                async for _ in pieces:
                    pass

        try:
            await self._unless_gone(request, read())
        except BaseException as error:
            self._failed(error)
            raise
        self._answered(running, telemetry)
        return running

    async def whole(
        self, request: Request, start: Callable[[], AnswerStream], shape: Shape, telemetry: Telemetry
    ) -> Response:
        """Answer a chat or a completion in one piece."""
        running = await self.answer(request, start, telemetry)
        assert running.answer is not None
        return JSONResponse(shape.whole(running, telemetry), headers=telemetry.headers(running))

    async def stream(
        self, request: Request, start: Callable[[], AnswerStream], shape: Shape, telemetry: Telemetry, counted: bool
    ) -> Response:
        """Answer a chat or a completion as a stream, with its usage if ``counted``."""
        running = self.running(start, telemetry.tag)
        events = self._events(running, shape, telemetry, counted)
        # Until the first piece is there, what goes wrong still has a status of its own.
        first = await self._unless_gone(request, anext(events))
        return EventStream(first, events, telemetry.early_headers(running))

    async def _events(
        self, running: Running, shape: Shape, telemetry: Telemetry, counted: bool
    ) -> AsyncGenerator[str, None]:
        """The events of a stream; until the first one, errors are raised."""
        opening, begun = "".join(shape.opening(counted)), False
        try:
            async with aclosing(running.pieces()) as pieces:
                async for text in pieces:
                    event, opening, begun = opening + shape.piece(text, counted), "", True
                    yield event
            self._answered(running, telemetry)
            yield opening + "".join(shape.ending(running, telemetry, counted))
        except (asyncio.CancelledError, GeneratorExit) as error:
            if running.answer is None:
                self._failed(error)
            raise
        except Exception as error:
            self._failed(error)
            if not begun:
                raise
            _log.warning("a stream broke off: %s", error)
            yield error_event(translate(error))

    async def _unless_gone(self, request: Request, work: Awaitable[Result]) -> Result:
        """Wait for ``work``, but not longer than for the client to leave."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGoneError("the client closed its connection")
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def _answered(self, running: Running, telemetry: Telemetry) -> None:
        answer = running.answer
        assert answer is not None
        reuse = telemetry.reuse(answer)
        self.metrics.answered(reuse, answer.timings, running.queued, answer.completion_tokens)
        current().set(
            outcome=reuse.name, reason=reuse.reason, collection=telemetry.collection, workload=telemetry.tag.workload,
            queued_seconds=running.queued, queued_for=running.queued_for,
            reused_tokens=reuse.reused, recomputed_tokens=reuse.recomputed, fresh_tokens=reuse.fresh,
            generated_tokens=answer.completion_tokens,
        )  # fmt: skip

    def _failed(self, error: BaseException) -> None:
        left = isinstance(error, ClientGoneError | asyncio.CancelledError | GeneratorExit)
        self.metrics.failed("cancelled" if left else "error")

    def close(self) -> None:
        """Close the stores; threads that still run end at their next token, or their next document."""
        self.stopping.set()
        self._executor.shutdown(cancel_futures=True)
        self.backends.close()


async def _disconnected(request: Request) -> None:
    """Return when the client is gone; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def json_body(request: Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises
    ------
    ApiError
        400 if it is none.
    """
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; an object is allowed", code="invalid_json")
    return body
