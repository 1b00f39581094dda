"""The ASGI app: routes, errors in one shape, and the layers that requests pass."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from blendkv import __version__
from blendkv.blend.gate import Gate
from blendkv.errors import BlendKVError
from blendkv.serve.backends import Backends
from blendkv.serve.errors import ApiError, translate
from blendkv.serve.hints import hint_routes
from blendkv.serve.middleware import Accounts, Admission, Deadline, Key, Limits
from blendkv.serve.rag import rag_routes
from blendkv.serve.routes import openai_routes
from blendkv.serve.service import ClientGoneError, Service
from blendkv.serve.settings import ServeSettings

_CLIENT_CLOSED_REQUEST = 499
_log = logging.getLogger(__name__)


def create_app(backends: Backends, settings: ServeSettings) -> FastAPI:
    """Build the server's app over running backends; its lifespan closes them.

    ``app.state.admission`` tells whether requests run, and drains; ``app.state.service`` is what the routes share.
    Call it on the event loop that will serve.
    """
    service = Service(backends, settings)
    admission = Admission(settings.max_requests, service.metrics, settings.tenants)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="BlendKV", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service, app.state.admission = service, admission
    _add_errors(app)
    _add_watching(app, service, admission)
    app.include_router(openai_routes(service))
    app.include_router(rag_routes(service))
    app.include_router(hint_routes(service))
    if backends.plain is not None and not settings.clients:  # its other routes know nothing of tenants
        app.mount("/", backends.plain)
    # The last one added is the outermost.
    app.add_middleware(Limits, admission=admission, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(Key, keys=settings.keys)
    app.add_middleware(Deadline, seconds=settings.request_timeout)
    app.add_middleware(Accounts, metrics=service.metrics)
    return app


def _add_watching(app: FastAPI, service: Service, admission: Admission) -> None:
    """``/health`` and ``/metrics``."""
    backends = service.backends

    @app.get("/health")
    async def health() -> JSONResponse:
        pipeline = next(iter(backends.stores.values()))
        refused = pipeline.engine.unsupported or pipeline.gate.closed
        state = "draining" if admission.draining else "ready" if backends.alive() else "engine failed"
        body = {
            "status": state,
            "version": __version__,
            "engine": backends.engine,
            "model": backends.model,
            "blending": "yes" if refused is None else f"no: {refused}",
            "gate": {name: _gate(p.gate, str(p.mode)) for name, p in backends.stores.items()},
            "stores": list(backends.stores),
            "running": admission.running,
        }
        return JSONResponse(body, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        page, content_type = await service.thread(lambda: service.metrics.page(accept))
        return Response(page, headers={"Content-Type": content_type})


def _gate(gate: Gate, mode: str) -> dict[str, str | bool]:
    """The quality gate's verdict over a store, and the mode of questions that name none."""
    return {"verdict": gate.state, "required": gate.required, "mode": mode}


def _add_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape."""

    async def ours(request: Request, error: Exception) -> Response:
        translated = translate(error)
        if translated.status >= 500:
            _log.warning("request %s: %s", request.state.request_id, error)
        return translated.response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        response = found.response()
        response.headers.update(error.headers or {})
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return ApiError(400, f"{first['loc'][-1]}: {first['msg']}", param=str(first["loc"][-1])).response()

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ApiError, ours)
    app.add_exception_handler(BlendKVError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientGoneError, gone)
