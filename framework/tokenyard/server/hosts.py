"""The Host header: it has to be one, and one of those that are allowed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tokenyard.server.errors import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

_HOST = re.compile(rb"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")


class AllowedHosts:
    """Refuses requests for other names than these, which DNS rebinding needs; `*.example.org` = all below it.

    Probes are not looked at: what sends them calls by address. Without names every well-formed one will do.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], free_paths: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:].lower() for name in names if name.startswith("*."))
        self._free_paths = frozenset(free_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (reply := self._refusal(scope)) is not None:
            await reply.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ErrorReply | None:
        given = [value for name, value in scope["headers"] if name == b"host"]
        matches = [_HOST.fullmatch(value) for value in given]
        if len(given) > 1 or None in matches:
            return ErrorReply(status=400, message="the Host header is not valid")
        if not (self._names or self._suffixes) or scope["path"] in self._free_paths:
            return None
        host = matches[0][1].decode().lower() if matches and matches[0] else ""
        if host in self._names or host.endswith(self._suffixes or ("\0",)):
            return None
        return ErrorReply(status=403, message="this name of the server is not allowed; see server.allowed_hosts")
