"""Work that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest
from tokenyard.server.disconnect import departure, run_until

DEADLINE = 60.0  # seconds: liveness only


class Client:
    """The receiving half of a connection."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()

    async def receive(self) -> dict[str, object]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


class Work:
    """Runs until it is told to end, and tells how it did."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.outcome = "none"

    async def run(self) -> str:
        self.has_begun.set()
        try:
            await self.ends.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it takes its time to clean up
            self.outcome = "cancelled"
            raise
        self.outcome = "done"
        return "result"


def run(main: Coroutine[object, object, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main, DEADLINE)
        assert len(asyncio.all_tasks()) == 1  # nothing is left behind

    asyncio.run(limited())


def test_work_that_ends_first_gives_its_result() -> None:
    async def main() -> None:
        client, work = Client(), Work()
        work.ends.set()
        async with departure(client.receive) as gone:
            assert await run_until(work.run(), gone) == "result"

    run(main())


def test_work_is_cancelled_and_has_ended_when_its_client_leaves() -> None:
    async def main() -> None:
        client, work = Client(), Work()
        async with departure(client.receive) as gone:
            client.leaves.set()
            assert await run_until(work.run(), gone) is None
            assert work.outcome == "cancelled"

    run(main())


def test_a_client_that_left_before_the_work_began_is_noticed() -> None:
    async def main() -> None:
        client = Client()
        client.leaves.set()
        async with departure(client.receive) as gone:
            await gone
            assert await run_until(Work().run(), gone) is None

    run(main())


def test_what_the_work_raises_is_raised() -> None:
    async def fail() -> None:
        raise KeyError("own")

    async def main() -> None:
        async with departure(Client().receive) as gone:
            with pytest.raises(KeyError, match="own"):
                await run_until(fail(), gone)

    run(main())


def test_being_cancelled_ends_the_work_too() -> None:
    async def main() -> None:
        client, work = Client(), Work()

        async def outer() -> None:
            async with departure(client.receive) as gone:
                await run_until(work.run(), gone)

        task = asyncio.create_task(outer())
        await work.has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.outcome == "cancelled"

    run(main())
