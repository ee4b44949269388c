"""Server-sent events: a stream of JSON objects that ends with [DONE]."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection
from starlette.responses import Response

from tokenyard.server.disconnect import departure, run_until
from tokenyard.server.errors import describe_error
from tokenyard.server.service import request_id_of, service_of
from tokenyard.server.transport import abort_connection

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}  # proxies pass each event on at once


class EventStream(Response):
    """Sends what `events` yields, each a whole `data: ...` block as bytes, and [DONE] after the last.

    What it raises before its first event is raised before anything is sent, and becomes a plain HTTP error; later it
    becomes an event with an `error` object, then [DONE]. The generator is closed however the response ends: as soon
    as the client has disconnected, and when it has taken nothing for `server.slow_reader_timeout`. Events are asked for
    one at a time, when the last one is on its way, so that nothing piles up for a slow client.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HTTPConnection(scope)
        reader = _Reader(send, service_of(http).config.server.slow_reader_timeout)
        try:
            async with departure(receive) as gone:
                await run_until(self._send(http, reader), gone, reader.is_lost)
                if reader.is_lost.done() and abort_connection(scope):
                    logger.warning("request %s: its client reads too slowly and was cut off", request_id_of(http))
                    await gone
        finally:
            reader.close()
            await self._events.aclose()

    async def _send(self, http: HTTPConnection, reader: _Reader) -> None:
        first = await anext(self._events, b"")
        await reader.begin(self.raw_headers)
        await reader.take(first)
        try:
            async for event in self._events:
                await reader.take(event)
        except Exception as error:
            await reader.take(b"data: %b\n\n" % describe_error(error, request_id_of(http)).body())
        await reader.take(DONE, is_last=True)


class _Reader:
    """A client, and how long it has taken nothing: `is_lost` is done when that is too long.

    uvicorn lets a body wait while it holds 64 KiB that the client's connection has not taken. One timer a stream: none
    has to be made for each event.
    """

    __slots__ = ("_loop", "_send", "_since", "_timeout", "_timer", "is_lost")

    def __init__(self, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # loop time from which on it has been given something
        self._timer = self._loop.call_later(timeout, self._look)
        self.is_lost: asyncio.Future[None] = self._loop.create_future()

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._give({"type": "http.response.start", "status": 200, "headers": headers})

    async def take(self, body: bytes, *, is_last: bool = False) -> None:
        await self._give({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _give(self, message: Message) -> None:
        """Returns when the connection has room for more."""
        self._since = self._loop.time()
        await self._send(message)
        self._since = None

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        waited = 0.0 if self._since is None else self._loop.time() - self._since
        if waited < self._timeout:
            self._timer = self._loop.call_later(self._timeout - waited, self._look)
        elif not self.is_lost.done():
            self.is_lost.set_result(None)
