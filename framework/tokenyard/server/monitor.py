"""Monitor: watches over all requests of a server, and tells whoever shows them to people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenyard.engine_outputs import RequestEventKind
from tokenyard.errors import CapacityError, EngineDeadError
from tokenyard.request import FinishReason
from tokenyard.server.histogram import token_count_bounds
from tokenyard.server.request_context import request_context
from tokenyard.server.timeline import Timeline, Timelines
from tokenyard.server.totals import EngineCounters, Gauges, Totals, count_end, gauges
from tokenyard.server.waits import DEFERRED, WaitClock
from tokenyard.server.watched import EndedRequest, WatchedChoice, WatchedRequest

if TYPE_CHECKING:
    from tokenyard.engine.open_requests import Choice, OpenRequest
    from tokenyard.engine_outputs import (
        AdmittedRequest,
        EngineCoreOutputs,
        FinishedRequest,
        RequestEvent,
        SchedulerStats,
    )

_DEFAULT_MAX_MODEL_LEN = 131072  # tokens, for bounds of histograms, until an engine says


class EndListener(Protocol):
    """Who is told of requests, under the monitor's lock: it must not wait."""

    def arrived(self, watched: WatchedRequest) -> None:
        """A request goes to the engine."""

    def ended(self, ended: EndedRequest) -> None:
        """A request has ended, however."""


class Snapshot(NamedTuple):
    """All numbers, of one moment."""

    totals: Totals
    gauges: Gauges
    has_stats: bool  # whether engines tell their own


class Monitor:
    """The RequestListener of every engine that a server has, one after the other. For any number of threads.

    It counts a token in well under a microsecond, and holds no text. `has_stats`: engine.log_stats; `now` is the clock
    of the front end's engine link.
    """

    def __init__(
        self, timeline_size: int, *, has_stats: bool = True, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._log_stats = has_stats
        self._now = now
        self._lock = threading.Lock()
        self._requests: dict[str, WatchedRequest] = {}  # by request id
        self._choices: dict[str, WatchedChoice] = {}  # those that have not ended, by engine id
        self._waits = WaitClock()
        self._timelines = Timelines(timeline_size)
        self._totals = Totals(token_count_bounds(_DEFAULT_MAX_MODEL_LEN))
        self._counters = EngineCounters()
        self._stats: SchedulerStats | None = None  # told last
        self._has_begun = False
        self._listeners: list[EndListener] = []

    def listen(self, listener: EndListener) -> None:
        """Tell this one too."""
        with self._lock:
            self._listeners.append(listener)

    def begin_engine(self, max_model_len: int) -> None:
        """Another engine takes over. Its `max_model_len` bounds the histograms of tokens, if it is the first."""
        with self._lock:
            self._counters.restart()
            self._stats = None
            self._requests.clear()  # what is left there nobody will end, and its ids come again
            self._choices.clear()
            if not self._has_begun:
                self._has_begun = True
                self._totals = Totals(token_count_bounds(max_model_len))

    # What people ask

    def snapshot(self) -> Snapshot:
        """All numbers as they are now."""
        with self._lock:
            return Snapshot(self._totals.copy(), self._gauges(), self._log_stats)

    def timelines(self, request_id: str | None = None, limit: int = 100) -> list[Timeline]:
        """Of one HTTP request, or of the newest ones; copies."""
        with self._lock:
            found = list(self._timelines)[:limit] if request_id is None else self._timelines.find(request_id)
            return [
                replace(one, events=list(one.events), waited=dict(one.waited), finish_reasons=list(one.finish_reasons))
                for one in found
            ]

    def reject(self, reason: str) -> None:
        """A request was refused before it reached the engine."""
        with self._lock:
            self._totals.reject(reason)

    # RequestListener

    def added(self, request: OpenRequest) -> None:
        context = request_context()
        arrived_at = request.arrival_time if context is None else min(context.arrived_at, request.arrival_time)
        label = None if context is None else context.client_label
        with self._lock:
            earlier = self._timelines.newest(request.label)
            timeline = Timeline.of(
                request,
                client_label=label,
                number=0 if earlier is None else earlier.number + 1,
                arrived_at=arrived_at,
            )
            watched = WatchedRequest(request=request, context=context, timeline=timeline, arrived_at=arrived_at)
            timeline.arrived_on -= self._now() - arrived_at
            self._requests[request.request_id] = watched
            self._timelines.add(timeline)
            for choice in request.choices:
                self._queue(watched, choice)
            for listener in self._listeners:
                listener.arrived(watched)

    def stepped(self, outputs: EngineCoreOutputs, num_new_tokens: int, now: float) -> None:
        with self._lock:
            for admitted in outputs.admitted:
                self._admit(admitted)
            for event in outputs.events:
                self._take_event(event)
            self._take_tokens(outputs, now)
            for end in outputs.finished:
                if (choice := self._choices.get(end.request_id)) is not None:
                    self._leave(choice, now, end)
            self._totals.generation_tokens += num_new_tokens
            if outputs.num_scheduled_tokens:
                self._totals.step_tokens.observe(outputs.num_scheduled_tokens)
            if outputs.stats is not None:
                self._stats = outputs.stats
                self._counters.add(outputs.stats, self._totals)
                self._waits.set_reason(outputs.stats.wait_reason, now)

    def ended(self, request: OpenRequest, now: float | None) -> None:
        with self._lock:
            if (watched := self._requests.pop(request.request_id, None)) is not None:
                self._end(watched, self._now() if now is None else now)

    def lost(self, request_ids: Sequence[str], error: Exception) -> None:
        with self._lock:
            now = self._now()
            for request_id in request_ids:
                if (watched := self._requests.pop(request_id, None)) is None:
                    continue
                watched.timeline.error = _words(error)
                if isinstance(error, EngineDeadError):
                    self._end(watched, now, FinishReason.ERROR)
                else:
                    self._totals.reject("capacity" if isinstance(error, CapacityError) else "invalid")
                    for choice in watched.choices:
                        self._leave(choice, now)
                    self._timelines.ended(watched.timeline)

    # One step, in parts

    def _admit(self, admitted: AdmittedRequest) -> None:
        if (choice := self._choices.get(admitted.request_id)) is None:
            return
        request, timeline, totals = choice.owner.request, choice.owner.timeline, self._totals
        if not choice.owner.has_started:
            # As it is told to the user: the prompt counts once, and of it what the first choice found in the cache.
            choice.owner.has_started = True
            timeline.num_cached_tokens = admitted.num_cached_tokens
            totals.prompt_tokens += len(request.prompt.token_ids)
            totals.cached_prompt_tokens += admitted.num_cached_tokens
        timeline.add(admitted.scheduled_at, "scheduled", choice.choice.index, admitted.num_cached_tokens)
        self._enter(choice, admitted.scheduled_at)

    def _take_event(self, event: RequestEvent) -> None:
        if event.kind is RequestEventKind.CHUNK:
            self._totals.computed_prompt_tokens += event.num_tokens
        if (choice := self._choices.get(event.request_id)) is None:
            return
        tokens = event.num_tokens if event.kind not in (RequestEventKind.DEFERRED, RequestEventKind.RELEASED) else None
        choice.owner.timeline.add(event.at, event.kind.value, choice.choice.index, tokens, event.reason)
        match event.kind:
            case RequestEventKind.RESUMED:
                self._enter(choice, event.at)
            case RequestEventKind.PREEMPTED:
                choice.owner.timeline.num_preemptions += 1
                choice.num_places -= 1
                choice.queued_at, choice.began_to_wait = event.at, self._waits.begin(event.at)
            case RequestEventKind.DEFERRED if choice.deferred_at is None:
                self._stop_waiting(choice, event.at)
                choice.deferred_at = event.at
            case RequestEventKind.RELEASED:
                self._stop_waiting(choice, event.at)
                choice.queued_at, choice.began_to_wait = event.at, self._waits.begin(event.at)

    def _take_tokens(self, outputs: EngineCoreOutputs, now: float) -> None:
        choices = self._choices
        gaps: dict[float, int] = {}
        for engine_id in outputs.request_ids:
            choice = choices.get(engine_id)
            if choice is None:
                continue
            if choice.last_token_at is None:
                self._take_first_token(choice, now)
            else:
                gap = now - choice.last_token_at
                gaps[gap] = gaps.get(gap, 0) + 1
            choice.last_token_at = now
            if choice.choice.finish_reason is not None:  # by a stop string; else it stands among the ends
                self._leave(choice, now)
        for gap, times in gaps.items():  # most choices got their last token in the same step
            self._totals.inter_token_seconds.observe(gap, times)

    def _take_first_token(self, choice: WatchedChoice, now: float) -> None:
        owner = choice.owner
        if owner.first_token_at is None:
            self._totals.first_token_seconds.observe(now - owner.arrived_at)
        choice.first_token_at = now
        owner.timeline.add(now, "first_token", choice.choice.index)

    # Choices come and go

    def _queue(self, watched: WatchedRequest, choice: Choice) -> None:
        """It waits for its place."""
        at = watched.request.arrival_time
        one = WatchedChoice(owner=watched, choice=choice, queued_at=at, began_to_wait=self._waits.begin(at))
        watched.choices.append(one)
        self._choices[choice.engine_id] = one
        watched.timeline.add(at, "queued", choice.index)

    def _enter(self, choice: WatchedChoice, at: float) -> None:
        """It has its place in the batch, unless it was told already that it has lost that."""
        choice.num_places += 1
        if not choice.is_running:
            return
        self._stop_waiting(choice, at)
        if choice.first_token_at is None:
            choice.scheduled_at = at

    def _stop_waiting(self, choice: WatchedChoice, at: float) -> None:
        """Note what it has waited for."""
        if choice.deferred_at is not None:
            choice.owner.timeline.wait({DEFERRED: max(0.0, at - choice.deferred_at)})
            choice.deferred_at = None
        else:
            length = max(0.0, at - choice.queued_at)
            choice.owner.timeline.wait(self._waits.seconds(choice.began_to_wait, length, at))

    def _leave(self, choice: WatchedChoice, now: float, end: FinishedRequest | None = None) -> None:
        """It gets no more tokens."""
        if self._choices.pop(choice.choice.engine_id, None) is None:
            return
        if not choice.is_running:
            self._stop_waiting(choice, now)
        if end is not None and end.error is not None:
            choice.owner.timeline.error = choice.owner.timeline.error or end.error

    def _end(self, watched: WatchedRequest, now: float, otherwise: FinishReason = FinishReason.ABORT) -> None:
        """No choice gets any more; those that have no reason get this one."""
        request, timeline = watched.request, watched.timeline
        for one in watched.choices:
            self._leave(one, now)
        ended = EndedRequest(
            watched=watched,
            ended_at=now,
            finish_reasons=tuple((one.finish_reason or otherwise).value for one in request.choices),
            num_tokens=tuple(len(one.detokenizer.token_ids) for one in request.choices),
        )
        for choice, reason, count in zip(request.choices, ended.finish_reasons, ended.num_tokens, strict=True):
            timeline.add(now, "end", choice.index, count, _reason_in_full(reason, choice.stop_reason))
        timeline.finish_reasons = list(ended.finish_reasons)
        timeline.num_output_tokens = sum(ended.num_tokens)
        self._timelines.ended(timeline)
        count_end(self._totals, ended)
        for listener in self._listeners:
            listener.ended(ended)

    def _gauges(self) -> Gauges:
        choices = self._choices.values()
        stats = self._stats if choices else None  # what an engine without requests said last is over
        num_running = sum(choice.is_running for choice in choices)
        return gauges(
            num_running=num_running,
            num_waiting=len(choices) - num_running,
            num_deferred=sum(choice.is_deferred for choice in choices),
            stats=stats,
        )


def _words(error: Exception) -> str:
    """What went wrong, without what the user gave."""
    return "the engine ended" if isinstance(error, EngineDeadError) else f"refused: {type(error).__name__}"


def _reason_in_full(reason: str, stop_reason: int | str | None) -> str:
    """With what the engine saw, but for the user's text."""
    if stop_reason is None:
        return reason
    if reason == FinishReason.ABORT.value:
        return f"{reason} ({stop_reason})"  # the engine's own word
    return f"{reason} ({'string' if isinstance(stop_reason, str) else f'token {stop_reason}'})"
