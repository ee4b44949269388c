"""Timers around the calls that cross a plugin boundary; nothing else of the parts changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from tokenyard.interfaces.executor import Executor, StepFuture
from tokenyard.interfaces.kv_cache import KVCacheManager
from tokenyard.interfaces.observer import Observer
from tokenyard.interfaces.policy import SchedulingPolicy
from tokenyard.interfaces.scheduler import Scheduler
from tokenyard.scheduler.policy_calls import overridden

if TYPE_CHECKING:
    from tokenyard.bench.timers import Stopwatch
    from tokenyard.interfaces.executor import GrammarOutput
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

SCHEDULER_CALLS = ("schedule", "update_from_output")
KV_CACHE_CALLS = ("lookup", "allocate", "commit", "free", "take_events")


class _TimedFuture(Generic[ResultT]):
    """A StepFuture; waiting for its result is counted too."""

    def __init__(self, future: StepFuture[ResultT], stopwatch: Stopwatch) -> None:
        self._future = future
        self._timed_result = stopwatch.timed("executor.result", future.result)

    @property
    def ready_at(self) -> float | None:
        return self._future.ready_at

    def result(self) -> ResultT:
        return self._timed_result()


class Instrument:
    """`decorate` is for `build_engine`: timers become attributes of the parts, which stay what they are."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def decorate(self, part: PartT, /) -> PartT:
        """Time the calls that the part's interface names."""
        if isinstance(part, Scheduler):
            self.time_calls(part, "scheduler", SCHEDULER_CALLS)
        elif isinstance(part, KVCacheManager):
            self.time_calls(part, "kv_cache", KV_CACHE_CALLS)
        elif isinstance(part, SchedulingPolicy):
            self.time_calls(part, "policy", sorted(overridden(part)))
        elif isinstance(part, Observer):
            self.time_calls(part, "observer", ("on_step",))
        elif isinstance(part, Executor):
            self._time_executor(part)
        return part

    def time_calls(self, part: object, name: str, methods: Iterable[str]) -> None:
        """Put a timer on each method, found under `name.method`."""
        for method in methods:
            self._patch(part, method, self._stopwatch.timed(f"{name}.{method}", getattr(part, method)))

    def _time_executor(self, executor: Executor) -> None:
        execute = self._stopwatch.timed("executor.execute_model", executor.execute_model)
        sample = self._stopwatch.timed("executor.sample_tokens", executor.sample_tokens)

        def execute_model(output: SchedulerOutput) -> StepFuture[None]:
            return _TimedFuture(execute(output), self._stopwatch)

        def sample_tokens(grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
            return _TimedFuture(sample(grammar), self._stopwatch)

        self._patch(executor, "execute_model", execute_model)
        self._patch(executor, "sample_tokens", sample_tokens)

    def _patch(self, part: object, method: str, timed: Callable[..., object]) -> None:
        try:
            setattr(part, method, timed)
        except AttributeError:  # a class with __slots__ and without __dict__
            logger.warning("%s takes no timers: what it costs is counted where it is called", type(part).__name__)
