"""Handing a plain request on, as it came, to the engine's own OpenAI server in the same process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blendkv.observe.metrics import Metrics
from blendkv.serve.door import Turn
from blendkv.serve.errors import ApiError, unsupported
from blendkv.tenants import tenant_tag


def forwarded(body: bytes, parsed: dict[str, Any], model: str, tenant: str = "") -> bytes:
    """The bytes to hand on: those that came, without what only BlendKV reads.

    A tenant's request gets the tenant's salt in vLLM's prefix cache: how long a prefill takes must not tell of others'.

    Raises
    ------
    ApiError
        400 if a tenant's request says itself whose chunk KVs it wants.
    """
    if not tenant and "blendkv" not in parsed and parsed.get("model", model) == model:
        return body
    handed_on = {**{k: v for k, v in parsed.items() if k != "blendkv"}, "model": model}
    if tenant:
        if parsed.get("kv_transfer_params") is not None:
            raise unsupported("kv_transfer_params", "is not for tenants' keys; name a collection in blendkv instead")
        salts = [tenant_tag(tenant), *([str(parsed["cache_salt"])] if parsed.get("cache_salt") else [])]
        handed_on["cache_salt"] = "|".join(salts)
    return json.dumps(handed_on).encode()


class Passed(Response):
    """The answer of another ASGI app to this request.

    Parameters
    ----------
    app
        Who answers.
    body
        Of the request, which has been read already.
    metrics
        Counts the request as ``plain``, ``error`` or ``cancelled``.
    turn
        Its place at the door before the engine.
    more_headers
        What is added to the app's own.
    """

    def __init__(
        self, app: ASGIApp, body: bytes, metrics: Metrics, turn: Turn, more_headers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._turn, self._more = turn, [(k.encode(), v.encode()) for k, v in more_headers.items()]
        self._app, self._request_body, self._metrics = app, body, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the app answer."""
        headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"transfer-encoding")]
        headers.append((b"content-length", str(len(self._request_body)).encode()))
        # What routing has put into the scope is this server's, the rest is the request's.
        ours = ("app", "router", "endpoint", "route", "path_params")
        inner = {k: v for k, v in scope.items() if k not in ours and not k.startswith("fastapi")}
        replayed = False
        status = 0

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": self._request_body, "more_body": False}

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *self._more]}
            await send(message)

        try:
            async with self._turn:
                await self._app({**inner, "headers": headers}, replay, watch)
        except ApiError as error:
            self._metrics.failed("error")
            await error.response()(scope, receive, send)
            return
        except BaseException:
            self._metrics.failed("cancelled")
            raise
        if status < 400:
            self._metrics.passed()
        else:
            self._metrics.failed("error")
