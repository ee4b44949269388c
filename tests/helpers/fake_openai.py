"""A server of OpenAI's API whose every answer the test decides; in a thread, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Reply:
    """An answer at once."""

    body: object = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stream:
    """Server-sent events: text as it is, a number is a pause in seconds, None hangs up, a function is called."""

    parts: Sequence[str | float | Callable[[], object] | None]


Decide = Callable[["Asked"], "Reply | Stream"]


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


class FakeServer:
    """`routes` are by path; `asked` has what came, in order; `num_aborted` counts streams that clients left."""

    def __init__(self, url: str, routes: dict[str, Decide]) -> None:
        self.url = url
        self.routes = routes
        self.asked: list[Asked] = []
        self.num_aborted = 0

    def of(self, path: str) -> list[Asked]:
        """The requests to one route."""
        return [asked for asked in self.asked if asked.path == path]


def chunk(text: str = "", *, finish: str | None = None, ids: Sequence[int] | None = None) -> str:
    """An event of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
    return event({"choices": [choice]})


def chat_chunk(text: str | None = None, *, finish: str | None = None) -> str:
    """An event of a chat."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> str:
    """The last event before DONE."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


DONE = "data: [DONE]\n\n"


def models(*names: str) -> Decide:
    """What /v1/models answers."""
    return lambda asked: Reply({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


@contextmanager
def fake_server(**routes: Decide) -> Iterator[FakeServer]:
    """Routes by keyword: `models`, `chat`, `completions` or `detokenize`, `metrics`, `version`; more as `.routes`."""
    paths = {"models": "/v1/models", "chat": "/v1/chat/completions", "completions": "/v1/completions"}
    known = {paths.get(name, f"/{name}"): decide for name, decide in routes.items()}
    ready, stop = threading.Event(), asyncio.Event()
    found: list[FakeServer] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        server = FakeServer("", known)
        application = web.Application(client_max_size=2**26)
        application.router.add_route("*", "/{path:.*}", _handler(server))
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        found.append(server)
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()


def _handler(server: FakeServer) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        text = await request.text()
        asked = Asked(request.method, request.path, dict(request.headers), json.loads(text) if text else None)
        server.asked.append(asked)
        decide = server.routes.get(request.path)
        if decide is None:
            return web.json_response({"error": {"message": f"no route {request.path}", "code": 404}}, status=404)
        reply = decide(asked)
        if isinstance(reply, Stream):
            return await _stream(server, request, reply)
        if isinstance(reply.body, str):
            return web.Response(text=reply.body, status=reply.status, headers=reply.headers)
        return web.json_response(reply.body, status=reply.status, headers=reply.headers)

    return handle


async def _stream(server: FakeServer, request: web.Request, stream: Stream) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    try:
        for part in stream.parts:
            if part is None:
                assert request.transport is not None
                request.transport.abort()
                return response
            if isinstance(part, str):
                await response.write(part.encode())
            elif isinstance(part, float | int):
                await asyncio.sleep(part)
            else:
                part()
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        server.num_aborted += 1
        raise
    return response
