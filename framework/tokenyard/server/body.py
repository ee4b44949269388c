"""Request bodies: counted while they come, read whole, and parsed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tokenyard.server.strict_json import parse_json

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_READ_TIMEOUT = 60.0  # seconds for a whole body
_SWALLOWED = 8  # times the limit: so much of a body that is too long is read away, so that its sender reads the answer
_INLINE = 64 * 1024  # bytes: a longer body is parsed in a thread
_MOST_AT_ONCE = 8  # times the limit: bytes of all bodies that are being read, but for the first _INLINE of each
_RETRY_AFTER = {"Retry-After": "1"}
_PARSED = "tokenyard.json"


class JsonRoute(APIRoute):
    """A route behind `JsonBodies`, which takes the value that was parsed there: every route with a body is one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed


class _ParsedRequest(Request):
    async def json(self) -> Any:
        await self.body()
        return self.scope.pop(_PARSED)


class JsonBodies:
    """Reads the body when a route first asks for it, whole, and leaves its value to a `JsonRoute`.

    So a path that does not exist is 404 whatever its body, and nothing is read of a request without a key. The status
    of what is wrong is 413, 415, 408 or 400; 503 where the bodies of too many requests are being read.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = _Budget(max_bytes * _MOST_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _METHODS:
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._max_bytes, self._budget)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.is_complete:
                MutableHeaders(scope=message)["connection"] = "close"  # what else comes is not worth reading
            await send(message)

        await self._app(scope, body.receive, send_on)


class _Budget:
    """Bytes that bodies may still hold while they are read, over all requests. Nothing is taken for small ones.

    So those who leave long bodies unfinished keep out long bodies alone.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._parsing = asyncio.Lock()

    def grow(self, before: int, now: int) -> None:
        """A body had so many bytes and has more now; HTTPException where that is too much."""
        more = _counted(now) - _counted(before)
        if more > self._left:
            raise HTTPException(503, "too many long bodies are being read; try again later", _RETRY_AFTER)
        self._left -= more

    async def parse(self, content: bytes) -> object:
        """Long ones in a thread and one at a time: parsers do not let anybody else run until they are done."""
        if len(content) <= _INLINE:
            return parse_json(content)
        async with self._parsing:
            return await asyncio.to_thread(parse_json, content)

    def give_back(self, size: int) -> None:
        self._left += _counted(size)


def _counted(size: int) -> int:
    return max(0, size - _INLINE)


class _Body:
    """One request's, and then whatever comes after it."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int, budget: _Budget) -> None:
        self._scope = scope
        self._receive = receive
        self._headers = Headers(scope=scope)
        self._max_bytes = max_bytes
        self._budget = budget
        self._num_held = 0
        is_absent = self._headers.get("content-length", "0") == "0" and "transfer-encoding" not in self._headers
        self.is_complete = is_absent
        self._is_handed_on = False

    async def receive(self) -> Message:
        """The body's message has only a stand-in of it: the bytes are not kept for as long as the answer takes."""
        if self._is_handed_on:
            return await self._receive()
        self._is_handed_on = True
        try:
            async with asyncio.timeout(_READ_TIMEOUT):
                content = await self._read()
            if content is None:
                return {"type": "http.disconnect"}
            self._check_type()
            self._scope[_PARSED] = await self._budget.parse(content)
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {_READ_TIMEOUT:g} s") from None
        finally:
            self._budget.give_back(self._num_held)
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def _read(self) -> bytes | None:
        """All of it; None when the client has left."""
        parts: list[bytes] = []
        size, is_last = 0, False
        while not is_last:
            message = await self._receive()
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            is_last = not message.get("more_body", False)
            size += len(part)
            if size <= self._max_bytes:
                self._budget.grow(self._num_held, size)
                self._num_held = size
                parts.append(part)
            elif size > self._max_bytes * _SWALLOWED:
                break
        self.is_complete = is_last
        if size > self._max_bytes:
            raise HTTPException(413, f"the body is longer than {self._max_bytes} bytes, server.max_body_bytes")
        return b"".join(parts)

    def _check_type(self) -> None:
        given = self._headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "the body must be JSON, with the header 'Content-Type: application/json'")
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise HTTPException(415, "the body must not be compressed")
