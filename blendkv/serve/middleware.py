"""What every request passes on its way in, as plain ASGI: id and count, time-out, key, limits, body."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendkv.observe.metrics import Metrics
from blendkv.observe.tracing import Span
from blendkv.observe.tracing import request as traced_request
from blendkv.serve.errors import INVALID, ApiError, translate
from blendkv.serve.keys import ANYBODY, Keys, client_of
from blendkv.serve.stream import MEDIA_TYPE, error_event

OPEN_PATHS = ("/health", "/metrics")
"""Neither key nor limits: probes and scrapers must get through."""
_NO_DEADLINE = ("/v1/rag/ingest",)
_ROUTES = re.compile(
    r"/health|/metrics|/v1/(?:models|chat/completions|completions|rag/(?:ingest|query|documents)|blendkv/hint)(?=/|$)"
)
_ID = re.compile(rb"[\w.:-]{1,128}")
_log = logging.getLogger(__name__)


class Sent:
    """Remembers what was sent of a response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.ended = False
        self.events = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: Mapping[bytes, bytes] = dict(message.get("headers", ()))
            self.events = headers.get(b"content-type", b"").startswith(MEDIA_TYPE.encode())
        elif message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)
        await self._send(message)


class Accounts:
    """Outermost: gives a request its id, counts it, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [(k, v) for k, v in message.get("headers", ()) if k.lower() != b"x-request-id"]
                message = {**message, "headers": [*others, (b"x-request-id", request_id)]}
            await send(message)

        matched = _ROUTES.match(scope["path"])
        route = matched[0] if matched else "other"
        sent, began = Sent(named), time.perf_counter()
        try:
            with _traced(scope, route, request_id.decode()) as span:
                try:
                    await self._app(scope, receive, sent)
                except Exception as error:
                    _log.exception("request %s failed", request_id.decode())
                    await fail(sent, scope, receive, translate(error))
                finally:
                    span.answered(sent.status or 499)
        finally:
            self._metrics.http.labels(route, str(sent.status or 499)).inc()
            spent = (time.perf_counter() - began) * 1e3
            _log.info("%s %s %s %d %.0f ms", request_id.decode(), scope["method"], scope["path"], sent.status, spent)


def _traced(scope: Scope, route: str, request_id: str) -> AbstractContextManager[Span]:
    """The request's span; none for probes and scrapers."""
    if scope["path"] in OPEN_PATHS:
        return nullcontext(Span())
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return traced_request(headers, scope["method"], route, request_id)


async def fail(sent: Sent, scope: Scope, receive: Receive, error: ApiError) -> None:
    """End a response with an error: as a status, or as the last event of a stream that has begun."""
    if sent.status == 0:
        await error.response()(scope, receive, sent)
    elif not sent.ended and sent.events:
        await sent({"type": "http.response.body", "body": error_event(error).encode(), "more_body": False})


class Deadline:
    """Gives requests up after ``seconds``."""

    def __init__(self, app: ASGIApp, seconds: float) -> None:
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or end it with 504."""
        if scope["type"] != "http" or scope["path"] in _NO_DEADLINE or not self._seconds:
            await self._app(scope, receive, send)
            return
        sent = Sent(send)
        try:
            async with asyncio.timeout(self._seconds) as limit:
                await self._app(scope, receive, sent)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"the request took longer than {self._seconds:g} seconds; ask for fewer tokens, or come again"
            await fail(sent, scope, receive, ApiError(504, message, kind="timeout_error", code="timeout"))


class Key:
    """Asks for an API key, and notes whose it is; without keys requests are anybody's."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that carries the key, refuse others with 401."""
        client = ANYBODY
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            word, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            found = client_of(given.strip(), self._keys)
            if found is None or word.lower() != b"bearer":
                message = "wrong or missing API key; send the header Authorization: Bearer KEY"
                error = ApiError(401, message, kind="authentication_error", code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
            client = found
        scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)


class Admission:
    """How many requests are running, and whether new ones are let in.

    Each of ``tenants`` tenants may have its part of ``limit`` running, so that there is room for the others.

    Attributes
    ----------
    draining
        Set when the server is about to end: what runs goes on, new requests are refused.
    """

    def __init__(self, limit: int, metrics: Metrics, tenants: int = 1) -> None:
        self._limit, self._metrics = limit, metrics
        self._part = math.ceil(limit / tenants)
        self._running = 0
        self._of: Counter[str] = Counter()
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Requests that are being served."""
        return self._running

    def refuse(self, tenant: str) -> ApiError | None:
        """Why a new request of a tenant is not let in, or None."""
        if self.draining:
            return ApiError(503, "the server is shutting down; ask another one", kind="service_unavailable",
                            code="draining")  # fmt: skip
        if self._running >= self._limit or self._of[tenant] >= self._part:
            running = min(self._running, self._of[tenant])
            message = f"{running} requests are running, as many as are allowed; come again"
            return ApiError(429, message, kind="rate_limit_error", code="too_many_requests")
        return None

    def enter(self, tenant: str) -> None:
        """Count a request in."""
        self._running += 1
        self._of[tenant] += 1
        self._metrics.running.inc()
        self._idle.clear()

    def leave(self, tenant: str) -> None:
        """Count it out."""
        self._running -= 1
        self._of[tenant] -= 1
        self._metrics.running.dec()
        if self._running == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing runs."""
        await self._idle.wait()


class Limits:
    """Lets requests in within the limits, and reads their bodies."""

    def __init__(self, app: ASGIApp, admission: Admission, max_body_bytes: int) -> None:
        self._app, self._admission, self._most = app, admission, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it with 413, 429 or 503."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = scope["state"]["client"].tenant
        refused = self._admission.refuse(tenant)
        if refused is not None:
            await refused.response()(scope, receive, send)
            return
        self._admission.enter(tenant)
        try:
            body = await self._body(scope, receive)
            await self._app(scope, _Replayed(body, receive), send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        finally:
            self._admission.leave(tenant)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        parts: list[bytes] = []
        size = int(length) if length.isdigit() else 0
        more = True
        read = 0
        while more and max(size, read) <= self._most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client left before its body was read")
            parts.append(message.get("body", b""))
            read += len(parts[-1])
            more = message.get("more_body", False)
        if max(size, read) > self._most:
            raise ApiError(413, f"the body has more than {self._most} bytes, which is the limit; send less at once",
                           kind=INVALID, code="body_too_large")  # fmt: skip
        return b"".join(parts)


class _Replayed:
    """A body that was read, once more; then what the client does next."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()
