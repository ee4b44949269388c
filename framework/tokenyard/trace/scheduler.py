"""TracingScheduler: passes every call on to a scheduler, and has it recorded."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenyard.interfaces.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenyard.engine_outputs import (
        EngineCoreOutputs,
        FinishedRequest,
        RequestEvent,
        SchedulerStats,
        ShadowDecision,
    )
    from tokenyard.interfaces.scheduler import RequestSnapshot, SchedulerSnapshot
    from tokenyard.request import EngineCoreRequest, FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.trace.clock import CallClock
    from tokenyard.trace.recorder import Recorder
    from tokenyard.trace.sinks import Sinks


class TracingScheduler(Scheduler):
    """Changes nothing: what a call returns, or raises, is what the scheduler within returned, or raised.

    `clock` is the one that the scheduler within was given. Where recording fails, it ends with one warning.
    """

    def __init__(self, inner: Scheduler, clock: CallClock, recorder: Recorder, sinks: Sinks) -> None:
        self._inner = inner
        self._clock = clock
        self._recorder = recorder
        self._sinks = sinks
        self._events: list[RequestEvent] = []  # looked at, and not passed on yet

    def add_request(self, request: EngineCoreRequest) -> None:
        with self._call(lambda at, error: self._recorder.added(at, request, error)) as at:
            self._inner.add_request(request)
        self._note(lambda: self._recorder.added(at, request))

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        ids = tuple(request_ids)
        with self._call(lambda at, error: self._recorder.finished(at, ids, reason, error=error)) as at:
            ended = self._inner.finish_requests(ids, reason)
        self._note(lambda: self._recorder.finished(at, ids, reason, ended))
        self._note_idle(at)
        return ended

    def schedule(self) -> SchedulerOutput | None:
        with self._call(lambda at, error: self._recorder.raised(at, "schedule", error)) as at:
            output = self._inner.schedule()
        if self._sinks:
            events = self._inner.take_events()
            self._events += events
            otherwise = self._inner.take_shadow_decisions()
            self._note(lambda: self._recorder.scheduled(at, output, events, otherwise))
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        name = "update_from_output"
        with self._call(lambda at, error: self._recorder.raised(at, name, error, output, result)) as at:
            outputs = self._inner.update_from_output(output, result)
        self._note(lambda: self._recorder.updated(at, output, result, outputs))
        if outputs.finished:
            self._note_idle(at)
        return replace(outputs, events=self._with_events(outputs.events)) if self._events else outputs

    def take_finished(self) -> Sequence[FinishedRequest]:
        with self._call(lambda at, error: self._recorder.raised(at, "take_finished", error)) as at:
            finished = self._inner.take_finished()
        if finished:
            self._note(lambda: self._recorder.told(at, finished))
            self._note_idle(at)
        return finished

    def pause_admission(self, is_paused: bool) -> None:
        with self._call(lambda at, error: self._recorder.admission_paused(at, is_paused, error)) as at:
            self._inner.pause_admission(is_paused)
        self._note(lambda: self._recorder.admission_paused(at, is_paused))

    def reset_prefix_cache(self) -> bool:
        with self._call(lambda at, error: self._recorder.cache_reset(at, False, error)) as at:
            is_reset = self._inner.reset_prefix_cache()
        self._note(lambda: self._recorder.cache_reset(at, is_reset))
        return is_reset

    def wake_at(self) -> float | None:
        with self._call(lambda at, error: self._recorder.raised(at, "wake_at", error)) as at:
            moment = self._inner.wake_at()
        if moment is not None:
            self._note(lambda: self._recorder.wake(at, moment))
        return moment

    def take_events(self) -> Sequence[RequestEvent]:
        return self._with_events(self._inner.take_events())

    def take_shadow_decisions(self) -> Sequence[ShadowDecision]:
        return self._inner.take_shadow_decisions()

    # What changes nothing, and so is no record

    def has_requests(self) -> bool:
        return self._inner.has_requests()

    def stats(self) -> SchedulerStats:
        return self._inner.stats()

    def waiting_snapshot(self, limit: int) -> Sequence[RequestSnapshot]:
        return self._inner.waiting_snapshot(limit)

    def snapshot(self, limit: int | None = None) -> SchedulerSnapshot:
        return self._inner.snapshot(limit)

    # Recording

    def close(self) -> None:
        """The engine stops: write the end."""
        at = self._clock.now()
        self._note(lambda: self._recorder.closed(at))

    @contextmanager
    def _call(self, on_error: Callable[[float, str], None]) -> Iterator[float]:
        """Around a call of the scheduler within: gives its time, and has what it raises recorded."""
        at = self._clock.begin()
        try:
            yield at
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            self._note(lambda: on_error(at, told))
            raise
        finally:
            self._clock.end()

    def _note(self, record: Callable[[], None]) -> None:
        if not self._sinks:
            return
        try:
            record()
        except Exception as error:
            self._sinks.fail(error)

    def _note_idle(self, at: float) -> None:
        if self._sinks and not self._inner.has_requests():
            self._note(lambda: self._recorder.idle(at))

    def _with_events(self, events: Sequence[RequestEvent]) -> Sequence[RequestEvent]:
        """Those that were looked at come first: they happened before."""
        if not self._events:
            return events
        before, self._events = self._events, []
        return (*before, *events)
