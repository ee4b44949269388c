"""What a request's way through the server tells those who watch over it."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One HTTP request. Set by the middleware RequestIds, read where its requests go to the engine."""

    path: str = ""
    client_label: str | None = None  # the client's own X-Request-Id
    traceparent: str | None = None  # W3C trace context, as it came
    arrived_at: float = field(default_factory=time.monotonic)  # engine-clock seconds of a front end


_CONTEXT: ContextVar[RequestContext | None] = ContextVar("tokenyard_request", default=None)


def set_request_context(context: RequestContext) -> None:
    """Of what runs from here on, and of tasks that it makes."""
    _CONTEXT.set(context)


def request_context() -> RequestContext | None:
    """Of the HTTP request that this code runs for, if any."""
    return _CONTEXT.get()


def note_arrival() -> None:
    """The request is here as a whole, and its prompt is about to be tokenized: what it waits for from now on counts."""
    if (context := _CONTEXT.get()) is not None:
        context.arrived_at = time.monotonic()
