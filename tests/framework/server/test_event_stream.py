"""EventStream against a client that the test plays: order, errors, the end, disconnects, slow readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, MutableMapping
from types import SimpleNamespace
from typing import Any

import pytest
from tokenyard.config import EngineConfig, ServerConfig
from tokenyard.errors import DeadlineError, EngineOverloadedError, ValidationError
from tokenyard.server.service import Service
from tokenyard.server.sse import EventStream

DEADLINE = 60.0  # seconds: liveness only
A, B, DONE = b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"

Message = MutableMapping[str, Any]


class Client:
    """Takes what it is sent until it is told to take nothing more, or leaves."""

    def __init__(self, slow_reader_timeout: float = DEADLINE) -> None:
        service = Service(config=EngineConfig(server=ServerConfig(slow_reader_timeout=slow_reader_timeout)))
        app = SimpleNamespace(state=SimpleNamespace(service=service))
        self.scope: dict[str, Any] = {
            "type": "http",
            "app": app,
            "headers": [],
            "state": {"request_id": "7"},
            "extensions": {"tokenyard.abort": {"abort": self.abort}},
        }
        self.sent: list[Message] = []
        self.takes = asyncio.Event()
        self.takes.set()
        self.leaves = asyncio.Event()
        self.is_cut_off = False

    def abort(self) -> None:
        self.is_cut_off = True
        self.leaves.set()

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        await self.takes.wait()

    async def read(self, events: AsyncGenerator[bytes, None]) -> None:
        await EventStream(events)(self.scope, self.receive, self.send)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


class Events:
    """A generator that yields `items`, raising those that are errors, and waits for ever at None."""

    def __init__(self, *items: bytes | Exception | None) -> None:
        self.items = items
        self.num_asked = 0
        self.is_closed = False

    async def generate(self) -> AsyncGenerator[bytes, None]:
        try:
            for item in self.items:
                self.num_asked += 1
                if item is None:
                    await asyncio.Event().wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.is_closed = True


def run(main: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main, DEADLINE)
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind

    asyncio.run(limited())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_events_are_followed_by_done_and_have_the_headers_that_proxies_need() -> None:
    async def main() -> None:
        client = Client()
        await client.read(Events(A, B).generate())
        start = client.sent[0]
        headers = dict(start["headers"])
        assert start["status"] == 200
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"no-cache" in headers[b"cache-control"]
        assert headers[b"x-accel-buffering"] == b"no"
        assert b"content-length" not in headers
        assert client.bodies == [A, B, DONE]
        assert [message["more_body"] for message in client.sent[1:]] == [True, True, False]

    run(main())


@pytest.mark.parametrize(
    "error", [ValidationError("no", parameter="n", value=0), EngineOverloadedError("full"), RuntimeError("bug")]
)
def test_api_13_an_error_before_the_first_event_is_raised_before_anything_is_sent(error: Exception) -> None:
    async def main() -> None:
        client, events = Client(), Events(error)
        with pytest.raises(type(error)):
            await client.read(events.generate())
        assert client.sent == []
        assert events.is_closed

    run(main())


@pytest.mark.parametrize(
    ("error", "code"),
    [(DeadlineError("late"), 504), (RuntimeError("a secret"), 500), (EngineOverloadedError("x"), 503)],
)
def test_api_13_a_later_error_is_an_event_then_done(error: Exception, code: int) -> None:
    async def main() -> None:
        client = Client()
        await client.read(Events(A, error).generate())
        first, told, done = client.bodies
        assert (first, done) == (A, DONE)
        assert told.startswith(b"data: ")
        assert told.endswith(b"\n\n")
        body = json.loads(told.removeprefix(b"data: "))
        assert body["error"]["code"] == code
        assert "secret" not in body["error"]["message"]
        assert client.sent[-1]["more_body"] is False

    run(main())


@pytest.mark.parametrize("items", [(None,), (A, None)], ids=["before the first event", "after it"])
def test_req_03_a_client_that_leaves_closes_the_generator_at_once(items: tuple[bytes | None, ...]) -> None:
    async def main() -> None:
        client, events = Client(), Events(*items)
        reading = asyncio.create_task(client.read(events.generate()))
        await until(lambda: events.num_asked == len(items))
        client.leaves.set()
        await reading
        assert events.is_closed
        assert DONE not in client.bodies

    run(main())


def test_a_client_that_leaves_while_it_takes_nothing_closes_the_generator() -> None:
    async def main() -> None:
        client, events = Client(), Events(A, B)
        client.takes.clear()
        reading = asyncio.create_task(client.read(events.generate()))
        await until(lambda: client.sent)
        client.leaves.set()
        await reading
        assert events.is_closed

    run(main())


def test_d20_nothing_is_asked_for_as_long_as_a_client_takes_nothing() -> None:
    async def main() -> None:
        client, events = Client(), Events(*[A] * 10)
        client.takes.clear()
        reading = asyncio.create_task(client.read(events.generate()))
        await until(lambda: client.sent)
        for _ in range(100):
            await asyncio.sleep(0)
        assert events.num_asked == 1
        client.takes.set()
        await reading
        assert client.bodies == [A] * 10 + [DONE]

    run(main())


def test_d20_a_client_that_takes_nothing_for_too_long_is_cut_off() -> None:
    async def main() -> None:
        client, events = Client(slow_reader_timeout=0.05), Events(*[A] * 10)
        client.takes.clear()
        await client.read(events.generate())
        assert client.is_cut_off
        assert events.is_closed
        assert events.num_asked == 1

    run(main())


def test_without_a_way_to_cut_a_connection_off_the_stream_still_ends() -> None:
    async def main() -> None:
        client, events = Client(slow_reader_timeout=0.05), Events(A)
        del client.scope["extensions"]
        client.takes.clear()
        await client.read(events.generate())
        assert events.is_closed

    run(main())


def test_a_stream_whose_next_event_takes_long_is_no_slow_reader() -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        yield A
        await asyncio.sleep(0.2)
        yield B

    async def main() -> None:
        client = Client(slow_reader_timeout=0.05)
        await client.read(slow())
        assert client.bodies == [A, B, DONE]
        assert not client.is_cut_off

    run(main())


def test_a_server_that_is_told_to_end_closes_the_generator() -> None:
    async def main() -> None:
        client, events = Client(), Events(A, None)
        reading = asyncio.create_task(client.read(events.generate()))
        await until(lambda: events.num_asked == 2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert events.is_closed

    run(main())
