"""EarlyApp: a server answers its probes from the first moment on, before its application can even be imported."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from tokenyard.server.health import PROBES

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from tokenyard.server.service import Service


class EarlyApp:
    """An ASGI application in front of the whole one, which it makes meanwhile; requests other than probes wait."""

    def __init__(self, service: Service, make_app: Callable[[], ASGIApp]) -> None:
        self._service = service
        self._make_app = make_app
        self._app: ASGIApp | None = None
        self._is_made = asyncio.Event()

    async def make(self) -> None:
        """Make the whole application, in a thread."""
        self._app = await asyncio.to_thread(self._make_app)
        self._is_made.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None and scope["method"] == "GET":
            path = scope["path"].removeprefix(self._service.config.server.root_path)
            if (probe := PROBES.get(path)) is not None:
                status, body = probe(self._service)
                await _answer(send, status, msgspec.json.encode(body))
                return
        while self._app is None:
            await self._is_made.wait()
        await self._app(scope, receive, send)


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
