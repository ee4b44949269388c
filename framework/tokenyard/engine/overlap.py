"""OverlapEngineCore: step n+1 is scheduled while step n executes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.engine.loop import EngineLoop

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.engine_core import EngineCoreContext
    from tokenyard.interfaces.executor import StepFuture
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput


class _Step(NamedTuple):
    output: SchedulerOutput
    future: StepFuture[ModelRunnerOutput]


class OverlapEngineCore(EngineLoop):
    """At most `depth` steps are in flight; they are taken in one a `step`, oldest first.

    A step is scheduled before the tokens of those in flight are known, so a stop is seen up to `depth` - 1 steps
    late: the scheduler drops what was computed for a request after its end. Tokens are those of the sync loop.
    """

    def __init__(self, context: EngineCoreContext, *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"at least one step must be in flight, got depth={depth}")
        super().__init__(context)
        self._depth = depth
        self._in_flight: deque[_Step] = deque()

    def step(self) -> EngineCoreOutputs:
        with self._fatal_errors():
            while len(self._in_flight) < self._depth and (scheduled := self._schedule()) is not None:
                self._in_flight.append(_Step(scheduled, self._execute(scheduled)))
            if not self._in_flight:
                return self._without_step()
            output, future = self._in_flight.popleft()
            outputs = self._update(output, future)
        self._observe(output, outputs)
        return outputs

    def has_requests(self) -> bool:
        return super().has_requests() or (bool(self._in_flight) and self._failure is None)

    def shutdown(self) -> None:
        """Waits for the step that runs, if any; those behind it never start."""
        super().shutdown()
        self._in_flight.clear()
