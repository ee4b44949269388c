"""Sends requests in an open or a closed loop, and notes when each token came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenyard.errors import TokenyardError

if TYPE_CHECKING:
    from tokenyard.bench.serve_workload import LoadRequest
    from tokenyard.client.chunks import Chunk, Usage

Send = Callable[["LoadRequest"], "AsyncGenerator[Chunk, None]"]
"""Send a request; the chunks of its answer as they come."""


@dataclass(slots=True)
class Record:
    """What became of one request. Times are of the client's clock, in seconds."""

    request: LoadRequest
    due: float  # when it was to be sent; with a limit of requests at once it may have waited for another to end
    sent: float
    token_times: list[float] = field(default_factory=list)  # of each chunk with text, or with token ids
    last: float | None = None  # of the last chunk that has a choice
    ended: float | None = None
    usage: Usage | None = None
    num_told_tokens: int | None = None  # token ids in the chunks, where they tell them
    num_chunks: int = 0
    error: str | None = None

    @property
    def output_len(self) -> int:
        """Tokens generated, by the server's count; where it does not count, chunks with text."""
        return len(self.token_times) if self.usage is None else self.usage.completion_tokens

    @property
    def input_len(self) -> int:
        """Prompt tokens, by the server's count; where it does not count, those that were sent."""
        return self.request.input_len if self.usage is None else self.usage.prompt_tokens

    def take(self, chunk: Chunk, now: float) -> None:
        """Note a chunk."""
        self.num_chunks += 1
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self.last = now
            if choice.token_ids is not None:
                self.num_told_tokens = (self.num_told_tokens or 0) + len(choice.token_ids)
            if choice.added or choice.token_ids:
                self.token_times.append(now)

    def end(self, now: float) -> None:
        """The stream has ended well. An answer without any text began with its end."""
        self.ended = now
        if self.last is None:
            self.error = "the answer had no choice"
        elif not self.token_times:
            self.token_times.append(self.last)


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
