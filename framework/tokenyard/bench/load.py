"""Sends requests in an open or a closed loop, and notes when each token came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.client.answer_times import AnswerTimes
from tokenyard.errors import TokenyardError

if TYPE_CHECKING:
    from tokenyard.bench.serve_workload import LoadRequest
    from tokenyard.client.chunks import Chunk

Send = Callable[["LoadRequest"], "AsyncGenerator[Chunk, None]"]
"""Send a request; the chunks of its answer as they come."""


@dataclass(slots=True)
class Record(AnswerTimes):
    """What became of one request. Times are of the client's clock, in seconds."""

    request: LoadRequest
    due: float  # when it was to be sent; with a limit of requests at once it may have waited for another to end
    sent: float

    @property
    def input_len(self) -> int:
        """Prompt tokens, by the server's count; where it does not count, those that were sent."""
        return self.request.input_len if self.usage is None else self.usage.prompt_tokens


async def run_load(
    requests: Sequence[LoadRequest],
    send_times: Sequence[float],
    max_concurrency: int | None,
    send: Send,
    clock: Callable[[], float],
    on_end: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Send each request at its time, counted from now in seconds, or as soon after as fewer than the limit run.

    Records in the order of the requests; a request that fails has an `error`. When this is cancelled all end.
    """
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
    start = clock()

    async def run(request: LoadRequest, due: float) -> Record:
        async with slots:
            record = await _sent(request, due, send, clock)
        on_end()
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, after in zip(requests, send_times, strict=True):
            wait = start + after - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(run(request, start + after)))
    return [task.result() for task in tasks]


async def _sent(request: LoadRequest, due: float, send: Send, clock: Callable[[], float]) -> Record:
    record = Record(request, due, clock())
    try:
        async with contextlib.aclosing(send(request)) as chunks:
            async for chunk in chunks:
                record.take(chunk, clock())
        record.end(clock())
    except TokenyardError as error:
        record.error = str(error)
    return record
