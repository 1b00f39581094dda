"""Spans of OpenTelemetry, where it is installed and the process has set up its SDK; else nothing happens.

Only the API is used: what becomes of spans (sampling, export) is for the application to say. The spans of an answer
(``blendkv.lookup``, ``compute``, ``load``, ``blend``, ``decode``) hang under the one that is current where the answer
is asked for, in the server ``blendkv.request``.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias, TypeVar

try:
    from opentelemetry import propagate, trace
except ImportError:  # the extra `tracing` is not installed
    propagate = trace = None  # type: ignore[assignment]

Value: TypeAlias = str | bool | int | float | Sequence[str]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Span:
    """What is known of a piece of work; ``inner`` None: nobody wants to know."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def set(self, **attributes: Value | None) -> None:
        """Note attributes, ``tokens`` as ``blendkv.tokens``; None is left out."""
        if self._inner is not None and self._inner.is_recording():
            self._inner.set_attributes({f"blendkv.{k}": v for k, v in attributes.items() if v is not None})

    def answered(self, status: int) -> None:
        """Note the HTTP status that a request got."""
        if self._inner is not None:
            self._inner.set_attribute("http.response.status_code", status)
            if status >= 500:
                self._inner.set_status(trace.Status(trace.StatusCode.ERROR))


@contextmanager
def span(name: str, **attributes: Value | None) -> Iterator[Span]:
    """A span ``blendkv.NAME`` around the block, under the current one; an exception is noted in it."""
    if trace is None:
        yield Span()
        return
    with _tracer().start_as_current_span(f"blendkv.{name}") as inner:
        made = Span(inner)
        made.set(**attributes)
        yield made


@contextmanager
def detail(name: str, **attributes: Value | None) -> Iterator[Span]:
    """`span`, but only under one that is recorded: for what background threads do too, and for the smallest parts."""
    if trace is None or not trace.get_current_span().is_recording():
        yield Span()
        return
    with span(name, **attributes) as made:
        yield made


@contextmanager
def request(headers: Mapping[str, str], method: str, route: str, number: str) -> Iterator[Span]:
    """The span of a request that came over HTTP, ``blendkv.request``, under the one that its ``traceparent`` names."""
    if trace is None:
        yield Span()
        return
    known = {"http.request.method": method, "http.route": route, "blendkv.request_id": number}
    above, kind = propagate.extract(headers), trace.SpanKind.SERVER
    with _tracer().start_as_current_span("blendkv.request", context=above, kind=kind, attributes=known) as inner:
        yield Span(inner)


def current() -> Span:
    """The current span."""
    return Span() if trace is None else Span(trace.get_current_span())


def carried(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``call`` as it can be handed to another thread, so that its spans hang under the span that is current now."""
    context = contextvars.copy_context()

    def run(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        return context.run(call, *args, **options)

    return run


def _tracer() -> Any:
    return trace.get_tracer("blendkv")
