"""The drain, over a service that the test plays; with signals and processes: test_lifecycle."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from tokenyard.async_llm import AsyncLLM
from tokenyard.config import EngineConfig, ServerConfig
from tokenyard.server.drain import Drain
from tokenyard.server.service import Service

DEADLINE = 30.0  # seconds: liveness only


class FakeEngine:
    """Requests that run until they are aborted."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    def abort_all(self) -> None:
        self.aborted.set()
        self.aborted = asyncio.Event()  # those that come later are not meant


@pytest.mark.parametrize("num_turns", [0, 1, 5])
def test_a_request_that_comes_to_the_engine_after_the_signal_is_aborted_too(num_turns: int) -> None:
    """It was let in before, and is tokenized when all others are aborted."""
    service = Service(config=EngineConfig(server=ServerConfig(shutdown_timeout=0)))

    async def request(engine: FakeEngine, seconds: float) -> None:
        service.num_open += 1
        await asyncio.sleep(seconds)
        await engine.aborted.wait()
        service.num_open -= 1

    async def main() -> None:
        engine = FakeEngine()
        service.llm = cast("AsyncLLM", engine)
        drain = Drain(service)
        late = asyncio.create_task(request(engine, 0.03 * num_turns))
        await asyncio.sleep(0)
        drain.request()
        await asyncio.wait_for(drain.run(), DEADLINE)
        assert (late.done(), service.num_open) == (True, 0)

    asyncio.run(main())
