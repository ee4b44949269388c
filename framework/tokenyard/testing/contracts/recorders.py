"""Parts that pass every call on to another part, and note it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from tokenyard.interfaces.executor import Executor
from tokenyard.interfaces.observer import Observer
from tokenyard.interfaces.scheduler import Scheduler
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import EngineCoreOutputs, FinishedRequest, RequestEvent, SchedulerStats
    from tokenyard.interfaces.executor import GrammarOutput, KVCachePlan, StepFuture, WorkerReport
    from tokenyard.interfaces.scheduler import SchedulerSnapshot
    from tokenyard.request import EngineCoreRequest, FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

PartT = TypeVar("PartT")


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call of the loop about one step."""

    name: str  # schedule, execute, sample, update
    step: int


class RecordingScheduler(Scheduler):
    """Notes `schedule` and `update_from_output`."""

    def __init__(self, inner: Scheduler, calls: list[Call]) -> None:
        self._inner = inner
        self._calls = calls
        self._outputs: dict[int, SchedulerOutput] = {}

    def schedule(self) -> SchedulerOutput | None:
        output = self._inner.schedule()
        if output is not None:
            self._calls.append(Call("schedule", output.step))
            self._outputs[output.step] = output
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        if self._outputs.get(output.step) is not output or result.step != output.step:
            raise ContractViolation(
                "engine.order",
                f"step {output.step} is updated with the result of step {result.step}, or was updated before",
            )
        self._calls.append(Call("update", output.step))
        del self._outputs[output.step]
        return self._inner.update_from_output(output, result)

    def add_request(self, request: EngineCoreRequest) -> None:
        self._inner.add_request(request)

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        return self._inner.finish_requests(request_ids, reason)

    def has_requests(self) -> bool:
        return self._inner.has_requests()

    def reset_prefix_cache(self) -> bool:
        return self._inner.reset_prefix_cache()

    def wake_at(self) -> float | None:
        return self._inner.wake_at()

    def stats(self) -> SchedulerStats:
        return self._inner.stats()

    def take_finished(self) -> Sequence[FinishedRequest]:
        return self._inner.take_finished()

    def take_events(self) -> Sequence[RequestEvent]:
        return self._inner.take_events()

    def pause_admission(self, is_paused: bool) -> None:
        self._inner.pause_admission(is_paused)

    def snapshot(self, limit: int | None = None) -> SchedulerSnapshot:
        return self._inner.snapshot(limit)


class RecordingExecutor(Executor):
    """Notes `execute_model` and `sample_tokens`."""

    def __init__(self, inner: Executor, calls: list[Call]) -> None:
        self._inner = inner
        self._calls = calls
        self._executed: list[SchedulerOutput] = []
        self.steps: list[tuple[SchedulerOutput, StepFuture[ModelRunnerOutput]]] = []

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        self._calls.append(Call("execute", output.step))
        self._executed.append(output)
        return self._inner.execute_model(output)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        if not self._executed:
            raise ContractViolation("engine.order", "sample_tokens() without a step that was executed before")
        output = self._executed.pop(0)
        self._calls.append(Call("sample", output.step))
        future = self._inner.sample_tokens(grammar)
        self.steps.append((output, future))
        return future

    def initialize(self, config: EngineConfig) -> WorkerReport:
        return self._inner.initialize(config)

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        self._inner.allocate_kv_cache(plan)

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        return self._inner.collective_rpc(name, arguments)

    def check_health(self) -> None:
        self._inner.check_health()

    def shutdown(self) -> None:
        self._inner.shutdown()


class RecordingObserver(Observer):
    """Notes what it is told; with `inner` it passes it on, and notes whether that changed something or raised."""

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = inner
        self.steps: list[int] = []
        self.violations: list[ContractViolation] = []
        self.num_shutdowns = 0

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.steps.append(output.step)
        if self._inner is None:
            return
        before = _facts(output), _facts(result)
        try:
            self._inner.on_step(output, result, now)
        except Exception as error:
            self._note("observer.never_raises", f"on_step of step {output.step}: {type(error).__name__}: {error}")
        if (_facts(output), _facts(result)) != before:
            self._note("observer.changes_nothing", f"it changed what step {output.step} asked for or gave")

    def on_shutdown(self) -> None:
        self.num_shutdowns += 1
        if self._inner is None:
            return
        try:
            self._inner.on_shutdown()
        except Exception as error:
            self._note("observer.never_raises", f"on_shutdown: {type(error).__name__}: {error}")

    def _note(self, rule: str, what: str) -> None:
        self.violations.append(ContractViolation(rule, what))


class Recorder:
    """Decorates an engine's scheduler, executor and observers."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.observers: list[RecordingObserver] = []
        self.executor: RecordingExecutor | None = None

    def decorate(self, part: PartT, /) -> PartT:
        if isinstance(part, Scheduler):
            return cast("PartT", RecordingScheduler(part, self.calls))
        if isinstance(part, Executor):
            self.executor = RecordingExecutor(part, self.calls)
            return cast("PartT", self.executor)
        if isinstance(part, Observer):
            self.observers.append(RecordingObserver(part))
            return cast("PartT", self.observers[-1])
        return part

    def check_order(self) -> None:
        """Each step is scheduled, executed, sampled and updated, once and in order; steps overlap, they never swap."""
        scheduled = [call.step for call in self.calls if call.name == "schedule"]
        for name in ("execute", "sample", "update"):
            steps = [call.step for call in self.calls if call.name == name]
            if steps != scheduled:
                raise ContractViolation(
                    "engine.order", f"scheduled were steps {scheduled}, {name} was called for {steps}"
                )
        place = {call: index for index, call in enumerate(self.calls)}
        for step in scheduled:
            order = [place[Call(name, step)] for name in ("schedule", "execute", "sample", "update")]
            if order != sorted(order):
                raise ContractViolation(
                    "engine.order", f"the calls for step {step} came in the wrong order: {self.calls}"
                )


def _facts(value: object) -> object:
    """A value that is equal only when nothing in it has changed."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(_facts(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return tuple((key, _facts(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_facts(item) for item in value)
    return value
