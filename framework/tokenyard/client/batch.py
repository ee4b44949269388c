"""run_batch: many requests at once, their rows in the order of the requests."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.client.batch_file import BatchRequest, answer_row, error_row
from tokenyard.client.failures import RemoteError

if TYPE_CHECKING:
    from tokenyard.client.connection import Answer

Ask = Callable[[str, bytes], "Awaitable[Answer]"]
"""Send a body to a route. Raises RemoteError where there is no answer; any other error ends the batch."""

_WINDOW = 4  # rows for each request at once: so many wait for an earlier one to be written before no more are sent
_MAX_BYTES = 64 * 2**20  # of bodies and rows that are held; one request alone may have more
_TRIES = 6
_BUSY = (429, 503)  # statuses that say: later
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0  # seconds before another try, where the server does not say how long


@dataclass(slots=True)
class BatchCounts:
    """Rows that were written."""

    completed: int = 0  # status 200
    failed: int = 0


class _Row(NamedTuple):
    line: bytes
    is_answered: bool


async def run_batch(
    requests: Iterable[BatchRequest],
    ask: Ask,
    write: Callable[[bytes], None],
    max_concurrency: int,
    on_row: Callable[[], None] = lambda: None,
) -> BatchCounts:
    """Send each request, at most `max_concurrency` at once, and write a row for each, in the order of the requests.

    `write` takes a whole line. Memory is bounded however many requests there are. When this is cancelled or fails,
    the rows that are next and finished have been written, and no request goes on.
    """
    batch = _Batch(ask, write, max_concurrency, on_row)
    try:
        for request in requests:
            await batch.add(request)
        await batch.finish()
    finally:
        await batch.close()
    return batch.counts


class _Batch:
    def __init__(
        self, ask: Ask, write: Callable[[bytes], None], max_concurrency: int, on_row: Callable[[], None]
    ) -> None:
        self.counts = BatchCounts()
        self._ask = ask
        self._write = write
        self._on_row = on_row
        self._slots = asyncio.Semaphore(max_concurrency)
        self._window = _WINDOW * max_concurrency
        self._rows: collections.deque[asyncio.Task[_Row]] = collections.deque()
        self._num_bytes = 0

    async def add(self, request: BatchRequest) -> None:
        """Begin with a request, once there is room for the one after it."""
        self._num_bytes += len(request.body)
        self._rows.append(asyncio.create_task(self._row(request)))
        self._write_finished()
        while len(self._rows) >= self._window or (self._rows and self._num_bytes > _MAX_BYTES):
            await self._write_next()

    async def finish(self) -> None:
        """Write what is left."""
        while self._rows:
            await self._write_next()

    async def close(self) -> None:
        """End what runs; nothing is left to do after `finish`."""
        try:
            self._write_finished(only_answered=True)
        finally:
            for task in self._rows:
                task.cancel()
            await asyncio.gather(*self._rows, return_exceptions=True)

    async def _write_next(self) -> None:
        await asyncio.wait((self._rows[0],))
        self._write_finished()

    def _write_finished(self, *, only_answered: bool = False) -> None:
        while self._rows and self._rows[0].done():
            task = self._rows[0]
            if only_answered and (task.cancelled() or task.exception() is not None):
                return
            row = task.result()
            self._write(row.line)
            self._rows.popleft()
            self._num_bytes -= len(row.line)
            self.counts.completed += row.is_answered
            self.counts.failed += not row.is_answered
            self._on_row()

    async def _row(self, request: BatchRequest) -> _Row:
        row = await self._made(request)
        self._num_bytes += len(row.line) - len(request.body)
        return row

    async def _made(self, request: BatchRequest) -> _Row:
        if request.error is not None:
            return _Row(error_row(request, "invalid_line", request.error), False)
        async with self._slots:
            try:
                answer = await self._answer(request)
            except RemoteError as error:
                return _Row(error_row(request, "no_answer", str(error)), False)
        return _Row(answer_row(request, answer), answer.status == 200)

    async def _answer(self, request: BatchRequest) -> Answer:
        """The answer of the first try that finds the server neither busy nor away, or of the last."""
        for number in range(_TRIES - 1):
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**number)
            try:
                answer = await self._ask(request.route, request.body)
            except RemoteError as error:
                if error.status is not None:
                    raise
            else:
                if answer.status not in _BUSY:
                    return answer
                pause = _retry_after(answer, pause)
            await asyncio.sleep(pause)
        return await self._ask(request.route, request.body)


def _retry_after(answer: Answer, otherwise: float) -> float:
    """Seconds that a busy server asks for, within reason."""
    try:
        return min(_LONGEST_PAUSE, max(0.0, float(answer.headers.get("retry-after", ""))))
    except ValueError:  # none, or a date
        return otherwise
