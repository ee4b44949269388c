"""Server-sent events: a stream of JSON objects that ends with [DONE]."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends what `events` yields, each a whole `data: ...` block as bytes, and [DONE] after the last.

    What it raises before its first event is raised before anything is sent, so that it becomes a plain HTTP error; later
    it becomes an event with an `error` object. The generator is closed however the response ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            await self._events.aclose()
