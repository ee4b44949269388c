"""AsyncClient: many coroutines, one engine at the other end of a link."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.engine.output_processor import Load, OutputProcessor
from tokenyard.engine.request_listener import GuardedListener
from tokenyard.errors import EngineDeadError
from tokenyard.request import FinishReason
from tokenyard.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

    from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
    from tokenyard.engine.link import EngineLink
    from tokenyard.engine.request_listener import RequestListener
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import RequestOutput
    from tokenyard.request import EngineCoreRequest, SchedulingHints
    from tokenyard.sampling_params import SamplingParams

__all__ = ["AsyncClient", "Load", "Submission"]


class Submission:
    """Requests that one coroutine waits for: iterates over (index of the prompt, output), and ends with the last.

    However that ends, `close` has to be called: it ends in the engine what has not ended there, one step later. Raises
    ValidationError when the requests are refused, EngineDeadError when the engine ends.
    """

    __slots__ = ("_client", "_indices", "_waiter", "error", "is_told", "label", "loop", "news", "waits_for_ends")

    def __init__(
        self, client: AsyncClient, label: str | None, request_ids: Sequence[str], waits_for_ends: Sequence[str]
    ) -> None:
        self._client = client
        # By request id: those that have not given their last output
        self._indices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._waiter: asyncio.Future[None] | None = None
        self.label = next(iter(request_ids), "") if label is None else label
        self.loop = asyncio.get_running_loop()
        self.news: dict[str, None] = {}  # request ids that may have something to take
        self.waits_for_ends = frozenset(waits_for_ends)  # request ids whose only output is the last
        self.is_told = False  # its loop has been asked to wake it, and has not come to it
        self.error: Exception | None = None

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while self._indices:
            if (found := self._client.take(self)) is not None:
                request_id, output = found
                index = self._indices.pop(request_id) if output.finished else self._indices[request_id]
                return index, output
            self._waiter = self.loop.create_future()
            await self._waiter
        raise StopAsyncIteration

    @property
    def request_ids(self) -> Sequence[str]:
        """Those that have not given their last output."""
        return tuple(self._indices)

    def wake(self) -> None:
        """There is something to take; called in its event loop."""
        self.is_told = False  # first: what comes from here on is told anew
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Raise this where it is waited for; called in its event loop."""
        self.error = self.error or error
        self.wake()

    def close(self) -> None:
        """Its consumer has left, for whatever reason; a second call does nothing."""
        self._client.close(self)
        self._indices.clear()


class _Row(NamedTuple):
    """One prompt on its way to the engine, which knows each of its choices as a request."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    requests: Sequence[EngineCoreRequest]


class _Death(NamedTuple):
    """Why the engine ended. Everyone raises an error of their own: a shared one would collect their frames for good."""

    message: str
    cause: BaseException | None

    def error(self) -> EngineDeadError:
        if isinstance(self.cause, EngineDeadError):
            return self.cause.copied()
        error = EngineDeadError(self.message)
        error.__cause__ = self.cause
        return error


class AsyncClient:
    """Outputs are made when a consumer asks for them, out of what its request has by then.

    So nothing piles up for a slow one, and the link's thread does no more for many consumers than text and stop
    strings. Between the threads stands one lock, around the OutputProcessor and the submissions; no wait happens under
    it. Consumers may live in several event loops.
    """

    def __init__(self, link: EngineLink, inputs: InputProcessor, tokenizer: Tokenizer) -> None:
        self._link = link
        self._clock = link.clock
        self._inputs = inputs
        self._outputs = OutputProcessor(tokenizer)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._streams: dict[str, Submission] = {}  # by request id
        self._death: _Death | None = None
        self._on_death: Callable[[EngineDeadError], None] | None = None
        link.begin(self)

    @property
    def load(self) -> Load:
        """What the engine has to do, and has done."""
        with self._lock:
            return self._outputs.load

    def watch(self, listener: RequestListener) -> None:
        """Tell this one what becomes of requests that are submitted from now on."""
        with self._lock:
            self._outputs.listener = GuardedListener(listener)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Call this once when the engine ends, in whatever thread notices it; at once if it has ended. One callback."""
        with self._lock:
            self._on_death = callback
            death = self._death
        if death is not None:
            callback(death.error())

    async def stream(
        self,
        label: str | None,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        scheduling: SchedulingHints | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a checked prompt and yield its outputs by `params.output_kind`.

        However it ends, the request is gone from the engine one step later; one that has not ended is aborted. Raises
        ValidationError when the request is refused, EngineDeadError when the engine ends.
        """
        submission = self.submit(label, [prompt], [params], priority, scheduling)
        try:
            async for _, output in submission:
                yield output
        finally:
            submission.close()

    def submit(
        self,
        label: str | None,
        prompts: Sequence[TokenizedPrompt],
        params: Sequence[SamplingParams],
        priority: int,
        scheduling: SchedulingHints | None,
    ) -> Submission:
        """Queue checked prompts, all or none, for the running coroutine."""
        now, make = self._clock.now(), self._inputs.make_requests
        rows = [
            _Row(name, prompt, own, make(name, prompt, own, now, priority=priority, scheduling=scheduling))
            for name, (prompt, own) in zip(map(str, self._numbers), zip(prompts, params, strict=True), strict=False)
        ]
        only_ends = [row.request_id for row in rows if row.params.output_kind is RequestOutputKind.FINAL_ONLY]
        submission = Submission(self, label, [row.request_id for row in rows], only_ends)
        self._expect(submission, rows, now)
        try:
            self._link.add([request for row in rows for request in row.requests])
        except Exception as error:
            with self._lock:
                self._outputs.lose(submission.request_ids, error)
            self._forget(submission.request_ids)
            raise
        return submission

    def abort(self, labels: Iterable[str]) -> None:
        """End requests by what their users call them; unknown and ended ones are ignored."""
        wanted = frozenset(labels)
        self._abort(lambda submission: submission.label in wanted)

    def abort_all(self) -> None:
        """End every request."""
        self._abort(lambda submission: True)

    def take(self, submission: Submission) -> tuple[str, RequestOutput] | None:
        """(request id, what it sends next) of one that has something; None = there is nothing yet."""
        with self._lock:
            news = submission.news
            while news:
                request_id = next(iter(news))
                del news[request_id]
                if (output := self._outputs.stream_output(request_id)) is not None:
                    if output.finished:
                        del self._streams[request_id]
                        self._outputs.forget([request_id])
                    return request_id, output
        if submission.error is not None:  # last: what came before it is whole, or was paid for
            raise submission.error
        return None

    def close(self, submission: Submission) -> None:
        """Forget its requests, and end those that have not ended."""
        if request_ids := submission.request_ids:
            with self._lock:
                engine_ids = self._outputs.engine_ids(request_ids)
            self._forget(request_ids)
            submission.news.clear()  # of what is forgotten; no more is noted
            self._finish(engine_ids)

    def _expect(self, submission: Submission, rows: Sequence[_Row], now: float) -> None:
        with self._lock:
            if self._death is not None:
                raise self._death.error()
            for request_id, prompt, params, requests in rows:
                child_ids = [request.request_id for request in requests]
                self._outputs.add(request_id, prompt, params, now, child_ids, label=submission.label)
                self._streams[request_id] = submission

    def _abort(self, is_meant: Callable[[Submission], bool]) -> None:
        with self._lock:
            streams = {name: submission for name, submission in self._streams.items() if is_meant(submission)}
            engine_ids = self._outputs.engine_ids(tuple(streams))
            self._outputs.abort(tuple(streams), self._clock.now())
            _note(streams)
        self._wake(streams.values())
        self._finish(engine_ids)

    def _forget(self, request_ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            self._outputs.forget(request_ids)

    def _wake(self, streams: Iterable[Submission]) -> None:
        for lost in _wake(streams):
            self.close(lost)  # nobody will ever ask for it: its event loop is closed

    def _finish(self, engine_ids: Sequence[str]) -> None:
        if engine_ids:
            with contextlib.suppress(EngineDeadError):  # with the engine its requests have ended
                self._link.finish(engine_ids, FinishReason.ABORT)

    # In the link's thread, as its EngineListener

    def refuse(self, request_ids: Sequence[str], error: Exception) -> None:
        with self._lock:
            streams = self._lose(self._outputs.request_ids(request_ids), lambda: error)
        self._wake(streams)

    def deliver(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        with self._lock:
            update = self._outputs.process(outputs, self._clock.now())
            finished = frozenset(update.finished)
            streams = {
                request_id: stream
                for request_id in update.touched
                if (stream := self._streams.get(request_id)) is not None
                and (request_id not in stream.waits_for_ends or request_id in finished)
            }
            _note(streams)
        self._wake(streams.values())
        return update.stopped

    def end(self, failure: BaseException | None) -> None:
        if isinstance(failure, EngineDeadError):
            death = _Death(str(failure), failure)
        else:
            reason = "was shut down" if failure is None else f"stopped on an error ({failure})"
            death = _Death(f"the engine {reason}; start a new one", failure)
        with self._lock:
            self._death = death
            streams = self._lose(tuple(self._streams), death.error)
            on_death = self._on_death
        self._wake(streams)
        if on_death is not None:
            on_death(death.error())

    def _lose(self, request_ids: Sequence[str], error: Callable[[], Exception]) -> list[Submission]:
        """Those who wait for something that will not come; each gets an error of its own. Under the lock."""
        streams = [self._streams[request_id] for request_id in self._outputs.lose(request_ids, error())]
        for stream in streams:
            stream.error = stream.error or error()
        return streams


def _note(streams: Mapping[str, Submission]) -> None:
    for request_id, stream in streams.items():
        stream.news[request_id] = None


def _wake(streams: Iterable[Submission]) -> list[Submission]:
    """Tell the consumers that there is something, a call for each event loop; returns those whose loop is closed.

    One that was told and has not looked yet is not told again: calls must not pile up in a loop that is busy.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[Submission]] = {}
    for stream in streams:
        if not stream.is_told or stream.loop.is_closed():
            stream.is_told = True  # before the call, which may be answered at once
            by_loop.setdefault(stream.loop, []).append(stream)
    lost: list[Submission] = []
    for loop, its_streams in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_all, its_streams)
        except RuntimeError:
            lost += its_streams
    return lost


def _wake_all(streams: Sequence[Submission]) -> None:
    for stream in streams:
        stream.wake()
