"""What ends with its client: work that goes on only as long as somebody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnectedError(HTTPException):
    """Nobody waits for the answer any more: what is answered is only for the log."""

    def __init__(self) -> None:
        super().__init__(499, "the client has closed the connection")


@contextlib.asynccontextmanager
async def departure(receive: Receive) -> AsyncIterator[asyncio.Future[None]]:
    """A future that is done as soon as the client has disconnected. The body must have been read."""
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        yield watcher
    finally:
        await _cancel(watcher)


async def run_until(work: Coroutine[object, object, T], *ends: asyncio.Future[None]) -> T | None:
    """What `work` returns; None where it was cancelled, and has ended, because one of `ends` was done first."""
    task = asyncio.create_task(work)
    waited: list[asyncio.Future[Any]] = [task, *ends]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[T]) -> None:
    """Wait until it has ended; what it raised in doing so concerns nobody."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
