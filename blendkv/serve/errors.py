"""Errors in the shape that OpenAI's clients know, and how BlendKV's own become one."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from blendkv.errors import BlendKVError, EngineError, InputError, PromptTooLongError, StoreError

INVALID = "invalid_request_error"
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer that is an error: status, and OpenAI's ``message``, ``type``, ``param`` and ``code``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        suggestion: dict[str, Any] | None = None,
        retry_after: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.suggestion = param, code, suggestion
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error: dict[str, Any] = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        if self.suggestion is not None:
            error["suggestion"] = self.suggestion
        return {"error": error}

    def response(self) -> JSONResponse:
        """The response; 429 and 503 say when to come again."""
        headers = {"Retry-After": str(self.retry_after)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def unsupported(field: str, why: str) -> ApiError:
    """A field that would change the answer and is not supported."""
    return ApiError(400, f"{field} {why}", param=field, code="unsupported_parameter")


def translate(error: BaseException) -> ApiError:
    """The HTTP error for an exception; what nobody expected is a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PromptTooLongError):
        return ApiError(413, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, StoreError):
        return ApiError(503, str(error), kind="service_unavailable", code="store_unavailable")
    if isinstance(error, EngineError):
        return ApiError(503, str(error), kind="service_unavailable", code="engine_failed")
    if isinstance(error, BlendKVError):
        return ApiError(500, str(error), kind="server_error")
    return ApiError(500, "the server failed; its log says more under this request id", kind="server_error")
