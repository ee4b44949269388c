"""The connection below a response, for what ASGI has no words for: closing it at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_EXTENSION = "tokenyard.abort"


def http_protocol() -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`: uvicorn's own, whose connections `abort_connection` can close.

    Where httptools is missing, which it is on PyPy alone, uvicorn's other one is left as it is.
    """
    if not hasattr(AutoHTTPProtocol, "on_message_begin"):
        return AutoHTTPProtocol
    return _with_abort(cast("type[HttpToolsProtocol]", AutoHTTPProtocol))


def abort_connection(scope: Scope) -> bool:
    """Close a request's connection with what its client has not taken, for which a plain close waits for ever.

    False where the server has no way to do so.
    """
    extension = scope.get("extensions", {}).get(_EXTENSION)
    if extension is None:
        return False
    cast("Callable[[], None]", extension["abort"])()
    return True


def _with_abort(base: type[HttpToolsProtocol]) -> type[HttpToolsProtocol]:
    class Protocol(base):  # type: ignore[misc, valid-type]  # a class chosen at run time
        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {_EXTENSION: {"abort": self.transport.abort}}

    return Protocol
