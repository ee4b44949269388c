"""API keys: every route needs one, except those that are listed as public."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from tokenyard.server.errors import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

_SCHEME = b"bearer "
_CHALLENGE = {"WWW-Authenticate": "Bearer"}
_MISSING = "this needs an API key; send it as the header 'Authorization: Bearer KEY'"
_WRONG = "the API key is not valid here"


class ApiKeys:
    """The accepted keys, as digests. How long a look-up takes tells nothing about them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def id_of(self, given: bytes) -> str | None:
        """A name of the key that was given, which does not give it away; None when it is none of the accepted ones.

        It is compared with every one of them, to the end.
        """
        digest = _digest(given)
        found = False
        for accepted in self._digests:
            found |= hmac.compare_digest(accepted, digest)
        return digest.hex()[:16] if found else None


class Authentication:
    """Lets through what has a key, and what is for a public path exactly as it is written here.

    What it decides by is the path that the router matches: neither the Host header nor the URL made from it. Puts
    `api_key_id` into the scope's state.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, public_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._public_paths = frozenset(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = _given_key(scope)
        key_id = None if given is None else self._keys.id_of(given)
        if key_id is not None:
            scope.setdefault("state", {})["api_key_id"] = key_id
        elif not (scope["type"] == "http" and self._is_public(scope)):
            await _refuse(scope, receive, send, _MISSING if given is None else _WRONG)
            return
        await self._app(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        path, root = scope["path"], scope.get("root_path", "")
        return path in self._public_paths or (path.startswith(root) and path[len(root) :] in self._public_paths)


def _given_key(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
        return None
    key: bytes = values[0][len(_SCHEME) :].strip()
    return key or None


async def _refuse(scope: Scope, receive: Receive, send: Send, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "an API key is needed"})
        return
    await ErrorReply(status=401, message=message, headers=_CHALLENGE).response()(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
