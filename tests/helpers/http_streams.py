"""Many streams of server-sent events at once, over plain sockets: each can be left at any point, and read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from http_server import ThreadServer
from tokenyard.engine.engine_thread import EngineThread
from tokenyard.launch.assemble import RunningEngine

T = TypeVar("T")

DEADLINE = 60.0  # seconds: liveness only
COMPLETIONS = "/v1/completions"


class RawStream:
    """One POST request on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def read_head(self) -> None:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(head[0].split()[1])
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}

    async def body(self) -> bytes:
        """All of a body that comes at once or in chunks, after the head."""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            chunk = await self.reader.readexactly(size + 2)
            yield chunk[:-2]
        await self.reader.readline()

    async def events(self) -> AsyncIterator[str]:
        """What stands after `data: `, `[DONE]` among them."""
        text = b""
        async for chunk in self.chunks():
            text += chunk
            *whole, text = text.split(b"\n\n")
            for event in whole:
                assert event.startswith(b"data: "), event
                yield event.removeprefix(b"data: ").decode()
        assert text == b""

    def drop(self, *, abruptly: bool = False) -> None:
        """Close the connection, whatever is under way on it."""
        if abruptly:
            self.writer.transport.abort()
        else:
            self.writer.close()


@contextlib.asynccontextmanager
async def post(
    url: str,
    body: Mapping[str, object],
    path: str = COMPLETIONS,
    headers: Mapping[str, str] | None = None,
    receive_buffer: int | None = None,
) -> AsyncIterator[RawStream]:
    """A request that was sent; nothing of the answer has been read."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=connection)
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    stream = RawStream(reader, writer)
    try:
        await writer.drain()
        yield stream
    finally:
        stream.drop()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask(
    url: str, body: Mapping[str, object], path: str = COMPLETIONS, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of a request that does not stream."""
    async with post(url, body, path, headers) as stream:
        await stream.read_head()
        return stream.status, json.loads(await stream.body()), stream.headers


async def stream_all(url: str, body: Mapping[str, object], path: str = COMPLETIONS) -> list[str]:
    """The events of a whole stream."""
    async with post(url, {**body, "stream": True}, path) as stream:
        await stream.read_head()
        assert stream.status == 200, await stream.body()
        return [event async for event in stream.events()]


def text_of(events: list[str]) -> str:
    """Of a stream of completion chunks that ended with [DONE]."""
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def run(main: Coroutine[object, object, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, DEADLINE)

    return asyncio.run(limited())


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds, without holding up the loop."""

    async def poll() -> None:
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.005)

    try:
        await asyncio.wait_for(poll(), DEADLINE)
    except TimeoutError:
        raise AssertionError(what) from None


def engine_thread(server: ThreadServer) -> EngineThread[RunningEngine]:
    """The thread in which the engine of a ThreadServer steps."""
    return cast("EngineThread[RunningEngine]", server.llm._link)


@contextlib.contextmanager
def paused(server: ThreadServer) -> Iterator[None]:
    """No request makes progress; they are still taken, and ended."""
    engine_thread(server).call(lambda core: core.pause())
    try:
        yield
    finally:
        engine_thread(server).call(lambda core: core.resume())
