"""Bounds on the head of a request - its first line and headers - which httptools would take at any length and pace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT = 30.0  # seconds for a whole head, from the connection or its first byte
_TOO_LONG = f"The head of the request is longer than {MAX_HEAD_BYTES} bytes."


def with_head_limits(base: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn, with the bounds; another one than that of httptools is left as it is."""
    return _limited(base) if hasattr(base, "on_headers_complete") else base  # type: ignore[arg-type]


class _HeadTooLongError(Exception):
    """Makes the parser stop; its protocol answers 400."""


def _limited(base: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    class Protocol(base):  # type: ignore[misc, valid-type]  # a class chosen at run time
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._num_head_bytes = 0
            self._is_in_head = True
            self._head_timer: asyncio.TimerHandle | None = None
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_in_head:
                self._num_head_bytes += len(data)
                self._wait_for_head()
            super().data_received(data)
            if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(_TOO_LONG)

        def on_headers_complete(self) -> None:
            if self._num_head_bytes > MAX_HEAD_BYTES and self._head_size() > MAX_HEAD_BYTES:
                raise _HeadTooLongError(_TOO_LONG)
            self._is_in_head = False
            self._stop_waiting()
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._num_head_bytes, self._is_in_head = 0, True

        def _head_size(self) -> int:
            return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

        def _wait_for_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol
