"""Request bodies: counted while they come, and checked to be JSON of a kind that all parsers read alike."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, NoReturn

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_READ_TIMEOUT = 60.0  # seconds for a whole body
_SWALLOWED = 8  # times the limit: so much of a body that is too long is read away, so that its sender reads the answer
_INLINE = 64 * 1024  # bytes: a longer body is parsed in a thread, and holds up no stream


class JsonBodies:
    """Reads the body when a route first asks for it, whole, and hands on what is valid.

    So a path that does not exist is 404 whatever its body. The status of what is wrong is 413, 415, 408 or 400.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _METHODS:
            await self._app(scope, receive, send)
            return
        body = _Body(receive, Headers(scope=scope), self._max_bytes)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.is_complete:
                MutableHeaders(scope=message)["connection"] = "close"  # what else comes is not worth reading
            await send(message)

        await self._app(scope, body.receive, send_on)


class _Body:
    """One request's, and then whatever comes after it."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int) -> None:
        self._receive = receive
        self._headers = headers
        self._max_bytes = max_bytes
        self.is_complete = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self._is_handed_on = False

    async def receive(self) -> Message:
        if self._is_handed_on:
            return await self._receive()
        self._is_handed_on = True
        try:
            async with asyncio.timeout(_READ_TIMEOUT):
                content = await self._read()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {_READ_TIMEOUT:g} s") from None
        if content is None:
            return {"type": "http.disconnect"}
        self._check_type()
        if len(content) > _INLINE:
            await asyncio.to_thread(check_json, content)
        else:
            check_json(content)
        return {"type": "http.request", "body": content, "more_body": False}

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


def check_json(content: bytes) -> None:
    """Raise HTTPException 400 for what is not strict JSON.

    NaN and Infinity are not; nor are numbers beyond a float's range, text that is not UTF-8 or has half a surrogate
    pair, a key that comes twice, and about a thousand levels.
    """
    if not content.strip():
        raise HTTPException(400, "the body is empty; it must be a JSON object")
    try:
        msgspec.json.decode(content)
        json.loads(content, object_pairs_hook=_once, parse_float=_skip, parse_int=_skip)
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply") from None
    except ValueError:
        raise HTTPException(400, "the body is not valid JSON") from None


def _skip(text: str) -> None:
    return None


def _once(pairs: list[tuple[str, object]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        _refuse_twice([name for name, _ in pairs])


def _refuse_twice(names: list[str]) -> NoReturn:
    twice = next(name for name in names if names.count(name) > 1)
    raise HTTPException(400, f"the key {twice[:100]!r} comes twice in one object of the body")
