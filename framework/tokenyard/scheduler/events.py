"""RequestEvents: what happens to requests between their arrival and their end, for whoever shows it to people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.engine_outputs import RequestEvent, RequestEventKind
from tokenyard.interfaces.policy import PreemptMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step_time import StepTime
    from tokenyard.scheduler_output import SchedulerOutput


class RequestEvents:
    """Collects events until they are taken, those of a step until it has landed. Decoding makes none.

    Switched off it keeps nothing, and its methods return at once.
    """

    def __init__(self, time: StepTime, *, is_on: bool) -> None:
        self._time = time
        self._is_on = is_on
        self._events: list[RequestEvent] = []
        self._of_steps: dict[int, list[RequestEvent]] = {}  # by step in flight
        self._deferred: dict[str, str] = {}  # request id -> the policy's words, as they were told

    def scheduled(self, output: SchedulerOutput, num_prefills: int, table: SlotTable) -> None:
        """A step was scheduled; the last `num_prefills` of its rows compute more than the token sampled last."""
        if not self._is_on or not num_prefills:
            return
        at = output.scheduled_at
        events = [
            RequestEvent(
                request_id=start.request_id,
                kind=RequestEventKind.RESUMED,
                at=at,
                num_tokens=start.num_computed_tokens,
            )
            for start in output.resumed
        ]
        slots, counts = output.slots[-num_prefills:].tolist(), output.num_scheduled_tokens[-num_prefills:].tolist()
        for slot, count in zip(slots, counts, strict=True):
            if (request := table.requests[slot]) is not None:
                events.append(
                    RequestEvent(request_id=request.request_id, kind=RequestEventKind.CHUNK, at=at, num_tokens=count)
                )
        self._of_steps[output.step] = events

    def landed(self, step: int) -> None:
        """A step has come back: its events can be told."""
        if events := self._of_steps.pop(step, None):
            self._events += events

    def preempted(
        self, request: Request, num_computed_tokens: int, reason: str, mode: PreemptMode = PreemptMode.RECOMPUTE
    ) -> None:
        """A request lost its place in the batch, and the tokens that were computed for it."""
        if self._is_on:
            self._note(request.request_id, RequestEventKind.PREEMPTED, num_computed_tokens, reason, mode.value)

    def went_on(self, request: Request, num_computed_tokens: int) -> None:
        """A paused request has its turn again."""
        if self._is_on:
            self._note(request.request_id, RequestEventKind.RESUMED, num_computed_tokens, None)

    def deferred(self, reasons: Mapping[str, str]) -> None:
        """The policy held these back in a step. Told once, until it says something else."""
        if not self._is_on:
            return
        for request_id, reason in reasons.items():
            if self._deferred.get(request_id) != reason:
                self._deferred[request_id] = reason
                self._note(request_id, RequestEventKind.DEFERRED, 0, reason)

    def released(self, request: Request) -> None:
        """The policy would let a request in, which does not fit."""
        if self._deferred.pop(request.request_id, None) is not None:
            self._note(request.request_id, RequestEventKind.RELEASED, 0, None)

    def entered_or_ended(self, request: Request) -> None:
        """A request waits no longer."""
        if self._deferred:
            self._deferred.pop(request.request_id, None)

    def take(self) -> Sequence[RequestEvent]:
        """What can be told, each event once."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    def _note(
        self, request_id: str, kind: RequestEventKind, num_tokens: int, reason: str | None, mode: str | None = None
    ) -> None:
        self._events.append(
            RequestEvent(
                request_id=request_id,
                kind=kind,
                at=self._time.now(),
                num_tokens=num_tokens,
                reason=reason,
                mode=mode,
            )
        )
