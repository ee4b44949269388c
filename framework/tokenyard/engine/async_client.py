"""AsyncClient: many coroutines, one engine at the other end of a link."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.engine.output_processor import OutputProcessor
from tokenyard.errors import EngineDeadError
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
    from tokenyard.engine.link import EngineLink
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import RequestOutput
    from tokenyard.request import SchedulingHints
    from tokenyard.sampling_params import SamplingParams


class _Stream:
    """One request and the coroutine that waits for it."""

    __slots__ = ("error", "has_news", "is_told", "label", "loop", "request_id")

    def __init__(self, request_id: str, label: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.label = label
        self.loop = loop
        self.has_news = asyncio.Event()
        self.is_told = False  # its loop has been asked to set `has_news`, and has not come to it
        self.error: Exception | None = None


class _Death(NamedTuple):
    """Why the engine ended. Everyone raises an error of their own: a shared one would collect their frames for good."""

    message: str
    cause: BaseException | None

    def error(self) -> EngineDeadError:
        error = EngineDeadError(self.message)
        error.__cause__ = self.cause
        return error


class AsyncClient:
    """Outputs are made when a consumer asks for them, out of what its request has by then.

    So nothing piles up for a slow one, and the link's thread does no more for many consumers than text and stop
    strings. Between the threads stands one lock, around the OutputProcessor and the streams; no wait happens under it.
    Consumers may live in several event loops.
    """

    def __init__(self, link: EngineLink, inputs: InputProcessor, tokenizer: Tokenizer) -> None:
        self._link = link
        self._clock = link.clock
        self._inputs = inputs
        self._outputs = OutputProcessor(tokenizer)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}  # by request id
        self._death: _Death | None = None
        link.begin(self)

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
        stream = self._submit(label, prompt, params, priority, scheduling)
        try:
            while True:
                await stream.has_news.wait()
                stream.has_news.clear()
                output = self._next(stream)
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            self._close(stream)

    def abort(self, labels: Iterable[str]) -> None:
        """End requests by what their users call them; unknown and ended ones are ignored."""
        wanted = frozenset(labels)
        with self._lock:
            streams = [stream for stream in self._streams.values() if stream.label in wanted]
            request_ids = [stream.request_id for stream in streams]
            engine_ids = self._outputs.engine_ids(request_ids)
            self._outputs.abort(request_ids, self._clock.now())
        _wake(streams)
        self._finish(engine_ids)

    def _submit(
        self,
        label: str | None,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        scheduling: SchedulingHints | None,
    ) -> _Stream:
        request_id, now = str(next(self._numbers)), self._clock.now()
        requests = self._inputs.make_requests(request_id, prompt, params, now, priority=priority, scheduling=scheduling)
        stream = _Stream(request_id, request_id if label is None else label, asyncio.get_running_loop())
        with self._lock:
            if self._death is not None:
                raise self._death.error()
            child_ids = [request.request_id for request in requests]
            self._outputs.add(request_id, prompt, params, now, child_ids, label=stream.label)
            self._streams[request_id] = stream
        try:
            self._link.add(requests)
        except EngineDeadError:
            self._forget(stream)
            raise
        return stream

    def _next(self, stream: _Stream) -> RequestOutput | None:
        if stream.error is not None:
            raise stream.error
        with self._lock:
            return self._outputs.stream_output(stream.request_id)

    def _close(self, stream: _Stream) -> None:
        """Its consumer has left, for whatever reason."""
        with self._lock:
            engine_ids = self._outputs.engine_ids([stream.request_id])
        self._forget(stream)
        self._finish(engine_ids)

    def _forget(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.pop(stream.request_id, None)
            self._outputs.forget([stream.request_id])

    def _finish(self, engine_ids: Sequence[str]) -> None:
        if engine_ids:
            with contextlib.suppress(EngineDeadError):  # with the engine its requests have ended
                self._link.finish(engine_ids, FinishReason.ABORT)

    # In the link's thread, as its EngineListener

    def refuse(self, request_ids: Sequence[str], error: Exception) -> None:
        with self._lock:
            wanted = self._outputs.request_ids(request_ids)
            streams = [self._streams[request_id] for request_id in wanted if request_id in self._streams]
        for stream in streams:
            stream.error = error
        _wake(streams)

    def deliver(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        with self._lock:
            update = self._outputs.process(outputs, self._clock.now())
            streams = [self._streams[request_id] for request_id in update.touched if request_id in self._streams]
        self._abandon(_wake(streams))
        return update.stopped

    def _abandon(self, streams: Sequence[_Stream]) -> None:
        """Nobody will ever ask for these: their event loops are closed."""
        for stream in streams:
            self._close(stream)

    def end(self, failure: BaseException | None) -> None:
        if isinstance(failure, EngineDeadError):
            death = _Death(str(failure), failure)
        else:
            reason = "was shut down" if failure is None else f"stopped on an error ({failure})"
            death = _Death(f"the engine {reason}; start a new one", failure)
        with self._lock:
            self._death = death
            streams = list(self._streams.values())
        for stream in streams:
            stream.error = stream.error or death.error()
        _wake(streams)


def _wake(streams: Sequence[_Stream]) -> list[_Stream]:
    """Tell the consumers that there is something, a call for each event loop; returns those whose loop is closed.

    One that was told and has not looked yet is not told again: calls must not pile up in a loop that is busy.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
    for stream in streams:
        if not stream.is_told or stream.loop.is_closed():
            stream.is_told = True  # before the call, which may be answered at once
            by_loop.setdefault(stream.loop, []).append(stream)
    lost: list[_Stream] = []
    for loop, its_streams in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_all, its_streams)
        except RuntimeError:
            lost += its_streams
    return lost


def _set_all(streams: Sequence[_Stream]) -> None:
    for stream in streams:
        stream.is_told = False  # first: what comes from here on is told anew
        stream.has_news.set()
