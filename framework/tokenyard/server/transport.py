"""The connection below requests, for what ASGI has no words for: closing it at once, and what is no request."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

logger = logging.getLogger(__name__)

_EXTENSION = "tokenyard.abort"
_LINE_INTERVAL = 60.0  # seconds between two lines of one kind, for which a client needs no key

_uvicorn_logger = logging.getLogger("uvicorn.error.connection")
_uvicorn_logger.setLevel(logging.ERROR)  # its warnings are a line for each odd request, and advice that does not apply


def http_protocol() -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`: uvicorn's own, whose connections `abort_connection` can close.

    Where httptools is missing, which it is on PyPy alone, uvicorn's other one is left as it is.
    """
    if not hasattr(AutoHTTPProtocol, "on_message_begin"):
        return AutoHTTPProtocol
    return _connection(cast("type[HttpToolsProtocol]", AutoHTTPProtocol))


def abort_connection(scope: Scope) -> bool:
    """Close a request's connection with what its client has not taken, for which a plain close waits for ever.

    False where the server has no way to do so.
    """
    extension = scope.get("extensions", {}).get(_EXTENSION)
    if extension is None:
        return False
    cast("Callable[[], None]", extension["abort"])()
    return True


class RareLine:
    """A warning that anybody can cause: the first is told at once, the others by their number with a later one."""

    def __init__(self, interval: float = _LINE_INTERVAL) -> None:
        self._interval = interval
        self._next_at = time.monotonic()
        self._num_untold = 0

    def tell(self, text: str) -> None:
        """`text` must hold nothing that a client wrote."""
        now = time.monotonic()
        if now < self._next_at:
            self._num_untold += 1
            return
        more = f" (and {self._num_untold} more since the last such line)" if self._num_untold else ""
        self._next_at, self._num_untold = now + self._interval, 0
        logger.warning("%s%s", text, more)


def _connection(base: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    invalid = RareLine()

    class Protocol(base):  # type: ignore[misc, valid-type]  # a class chosen at run time
        _answered: RequestResponseCycle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            self.logger = _uvicorn_logger
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._answered is not None:  # uvicorn tells the last request that was read, which others may precede
                self._answered.disconnected = True
                self._answered.message_event.set()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {_EXTENSION: {"abort": self.transport.abort}}

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
            self._answered = cycle
            super()._start_asgi_task(cycle, app)

        def send_400_response(self, msg: str) -> None:
            host = self.client[0] if self.client else "a local client"
            invalid.tell(f"what came from {host} is not a valid HTTP request; it was answered with 400")
            cycle = self._answered
            if cycle is None or cycle.response_complete or not cycle.response_started:
                self.transport.write(_invalid_answer(msg))
            self.transport.close()

    return Protocol


def _invalid_answer(message: str) -> bytes:
    from tokenyard.server.errors import ErrorReply  # imports fastapi, which a server answers its first probes without

    body = ErrorReply(status=400, message=message).body()
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body
