"""The outermost middleware: an id for each request, the count of open ones, and the last resort for errors."""

from __future__ import annotations

import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from tokenyard.server.errors import describe_error
from tokenyard.server.request_context import RequestContext, set_request_context

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from tokenyard.server.service import Service

HEADER = "x-request-id"
_MAX_TRACEPARENT = 128  # characters; W3C's have 55
_LABEL = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)


class RequestIds:
    """Puts `request_id` and `client_label` into the scope's state; answers what nobody else caught with a 500."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        headers = Headers(scope=scope)
        label = _client_label(headers.get(HEADER))
        scope.setdefault("state", {}).update(request_id=request_id, client_label=label)
        status: int | None = None
        began_at = _begin(scope, headers, label)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = label or request_id
            await send(message)

        counts = scope["method"] == "POST"
        self._service.num_open += counts
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            reply = describe_error(error, request_id)
            if status is not None:
                raise  # the server closes the connection: a cut answer must not look like a whole one
            await reply.response()(scope, receive, send_with_id)
        finally:
            self._service.num_open -= counts
            self._service.observation.http.count(scope, status, time.monotonic() - began_at)


def _begin(scope: Scope, headers: Headers, label: str | None) -> float:
    """Leave word of the request for those who watch over it; returns when it came, in seconds."""
    context = RequestContext(path=scope["path"], client_label=label, traceparent=_traceparent(headers))
    set_request_context(context)
    return context.arrived_at


def _traceparent(headers: Headers) -> str | None:
    given = headers.get("traceparent")
    return given if given is not None and len(given) <= _MAX_TRACEPARENT else None


def _client_label(given: str | None) -> str | None:
    return given if given is not None and _LABEL.fullmatch(given) else None
