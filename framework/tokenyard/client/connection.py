"""Connection: JSON and streams of chunks over HTTP, with every failure as a RemoteError."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tokenyard.client.chunks import Chunk, decode_chunk
from tokenyard.client.events import EventParser
from tokenyard.client.failures import RemoteError, message_of, refusal, told_as_remote_errors
from tokenyard.errors import UserError

if TYPE_CHECKING:
    import aiohttp

    from tokenyard.client.endpoint import Endpoint

MAX_BODY_BYTES = 64 * 2**20  # of an answer that is no stream
_CONNECT_SECONDS = 30.0
_END_SECONDS = 1.0
_DONE = b"[DONE]"


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class Connection:
    """Any number of requests to one server at once. Made inside an event loop; `close` it there."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout: float | None = None,
        silence: float | None = None,
        is_verified: bool = True,
    ) -> None:
        """In seconds: `timeout` is of a whole request, `silence` of a server that sends nothing in the middle of one.

        `is_verified` is whether the certificate must hold.
        """
        check_installed()
        import aiohttp  # of an extra

        self.endpoint = endpoint
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=is_verified),
            headers=endpoint.headers,
            timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_SECONDS, sock_read=silence),
            trust_env=not endpoint.is_local,
            auto_decompress=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """The answer, whatever its status; `body` is JSON. Redirects are not followed."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        with told_as_remote_errors(self.endpoint):
            sent = self._session.request(
                method, self.endpoint.url(path), data=body, headers=headers, allow_redirects=False
            )
            async with sent as response:
                return Answer(response.status, await _read(response), response.headers)

    async def json(self, method: str, path: str, body: object = None) -> object:
        """The JSON of an answer with status 200; any other status is a RemoteError."""
        answer = await self.request(method, path, None if body is None else msgspec.json.encode(body))
        if answer.status != 200:
            raise refusal(self.endpoint, answer.status, answer.body)
        with told_as_remote_errors(self.endpoint):
            decoded: object = msgspec.json.decode(answer.body)
            return decoded

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a streamed answer, as they come; close it to end the request.

        Raises RemoteError for a refusal, an error within the stream, and a stream that ends before its end.
        """
        sent_headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **(headers or {})}
        with told_as_remote_errors(self.endpoint):
            sent = self._session.post(self.endpoint.url(path), data=body, headers=sent_headers, allow_redirects=False)
            async with sent as response:
                if response.status != 200:
                    raise refusal(self.endpoint, response.status, await _read(response))
                chunks = _chunks(response, self.endpoint)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk


async def _chunks(response: aiohttp.ClientResponse, endpoint: Endpoint) -> AsyncGenerator[Chunk, None]:
    parser, has_finished = EventParser(), False
    async for piece in response.content.iter_any():
        for data in parser.feed(piece):
            if data == _DONE:
                await _read_end(response)
                return
            chunk = decode_chunk(data)
            if chunk.error is not None:
                raise RemoteError(f"{endpoint.root} failed in the middle of an answer: {message_of(data)}")
            has_finished = has_finished or any(choice.finish_reason is not None for choice in chunk.choices)
            yield chunk
    if not has_finished:
        raise RemoteError(f"{endpoint.root} broke off in the middle of an answer")


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """So that the connection can be used again; nothing is expected to come."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await response.content.read()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.read(MAX_BODY_BYTES + 1)
    pieces = [body]
    size = len(body)
    while body and size <= MAX_BODY_BYTES:
        body = await response.content.read(MAX_BODY_BYTES)
        pieces.append(body)
        size += len(body)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"more than {MAX_BODY_BYTES} bytes")
    return b"".join(pieces)


def check_installed() -> None:
    """Raise a UserError that names the extra where aiohttp is not installed."""
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("talking to a server needs aiohttp; install it with: pip install 'tokenyard[serve]'")


async def connect(endpoint: Endpoint, *, is_verified: bool = True) -> Connection:
    """A Connection without a limit of time, for a program that enters its event loop again and again."""
    return Connection(endpoint, is_verified=is_verified)
