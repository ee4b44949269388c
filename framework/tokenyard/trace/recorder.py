"""Recorder: calls of a scheduler as records, to the sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.trace.digests import MOST_AT_THE_END, MOST_WHILE_IDLE, cache_digest, outputs_digest
from tokenyard.trace.records import (
    Added,
    AdmissionPaused,
    CacheReset,
    Closed,
    Disagreement,
    End,
    Finished,
    Idle,
    Raised,
    Told,
    Updated,
    Wake,
    time_value,
)
from tokenyard.trace.requests import request_to_record
from tokenyard.trace.sampled import result_to_record
from tokenyard.trace.steps import StepNotes
from tokenyard.trace.waits import WaitNotes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenyard.engine_outputs import EngineCoreOutputs, FinishedRequest, RequestEvent, ShadowDecision
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.request import EngineCoreRequest, FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.trace.sinks import Sinks


class Recorder:
    """Told of each call after it was made, `at` engine-clock seconds. Whoever calls it catches what it raises."""

    def __init__(self, scheduler: Scheduler, kv_cache_manager: KVCacheManager, sinks: Sinks) -> None:
        self._kv = kv_cache_manager
        self._sinks = sinks
        self._steps = StepNotes()
        self._waits = WaitNotes(scheduler)

    def added(self, at: float, request: EngineCoreRequest, error: str | None = None) -> None:
        self._waits.changed()
        self._sinks.take(Added(at=at, request=request_to_record(request), error=error))

    def finished(
        self,
        at: float,
        ids: Sequence[str],
        reason: FinishReason,
        ended: Sequence[str] = (),
        error: str | None = None,
    ) -> None:
        self._gone(ended)
        self._sinks.take(Finished(at=at, ids=tuple(ids), reason=reason.value, ended=tuple(ended), error=error))

    def scheduled(
        self,
        at: float,
        output: SchedulerOutput | None,
        events: Sequence[RequestEvent],
        otherwise: Sequence[ShadowDecision] = (),
    ) -> None:
        if output is None or output.new or output.resumed or output.finished or events:
            self._waits.changed()
        free = self._kv.usage.num_free_blocks
        shadow = tuple(Disagreement(*one) for one in otherwise)
        self._sinks.take(self._steps.take(at, output, events, self._waits.take(), free, shadow))
        if output is None:
            self._sinks.flush()

    def updated(
        self, at: float, output: SchedulerOutput, result: ModelRunnerOutput, outputs: EngineCoreOutputs
    ) -> None:
        ended = _ends(outputs.finished)
        self._gone([end.id for end in ended])
        self._sinks.take(
            Updated(
                at=at,
                step=output.step,
                sampled=result_to_record(output, result),
                num_kept=len(outputs.token_ids),
                ended=ended,
                hash=outputs_digest(outputs),
            )
        )

    def told(self, at: float, finished: Sequence[FinishedRequest]) -> None:
        ended = _ends(finished)
        self._gone([end.id for end in ended])
        self._sinks.take(Told(at=at, ended=ended))

    def admission_paused(self, at: float, is_paused: bool, error: str | None = None) -> None:
        self._waits.changed()
        self._sinks.take(AdmissionPaused(at=at, is_paused=is_paused, error=error))

    def cache_reset(self, at: float, is_reset: bool, error: str | None = None) -> None:
        self._sinks.take(CacheReset(at=at, is_reset=is_reset, error=error))

    def wake(self, at: float, moment: float) -> None:
        self._sinks.take(Wake(at=at, moment=time_value(moment)))

    def raised(
        self,
        at: float,
        method: str,
        error: str,
        output: SchedulerOutput | None = None,
        result: ModelRunnerOutput | None = None,
    ) -> None:
        """A step could not be made, or taken in: the engine is about to die, so nothing waits in a buffer."""
        sampled = None if output is None or result is None else result_to_record(output, result)
        step = None if output is None else output.step
        self._sinks.take(Raised(at=at, method=method, error=error, step=step, sampled=sampled))
        self._sinks.flush()

    def idle(self, at: float) -> None:
        """The last request has ended."""
        self._sinks.take(Idle(at=at, cache=cache_digest(self._kv, MOST_WHILE_IDLE)))
        self._sinks.flush()

    def closed(self, at: float) -> None:
        cache = cache_digest(self._kv, MOST_AT_THE_END)
        self._sinks.take(Closed(at=at, num_steps=self._steps.num_steps, cache=cache))
        self._sinks.close()

    def _gone(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._steps.ended(request_ids)
            self._waits.changed()


def _ends(finished: Iterable[FinishedRequest]) -> tuple[End, ...]:
    return tuple(End(end.request_id, end.reason.value, end.stop_reason) for end in finished)
