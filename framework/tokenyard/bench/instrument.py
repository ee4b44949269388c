"""Timers around the calls of the mechanism's own parts; nothing else of them changes. See PluginTimes for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from tokenyard.interfaces.executor import Executor, StepFuture
from tokenyard.interfaces.scheduler import Scheduler
from tokenyard.plugin_times import PluginPoint

if TYPE_CHECKING:
    from tokenyard.interfaces.executor import GrammarOutput
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

SCHEDULER_CALLS = ("schedule", "update_from_output")


class _TimedFuture(Generic[ResultT]):
    """A StepFuture; waiting for its result is counted too."""

    def __init__(self, future: StepFuture[ResultT], timed_result: Callable[[], ResultT]) -> None:
        self._future = future
        self._timed_result = timed_result

    @property
    def ready_at(self) -> float | None:
        return self._future.ready_at

    def result(self) -> ResultT:
        return self._timed_result()


class Instrument:
    """`decorate` is for `build_engine`: timers become attributes of the parts, which stay what they are.

    `names` are those of the components that the config chooses, by kind.
    """

    def __init__(self, stopwatch: Stopwatch[PluginPoint], names: Mapping[str, str]) -> None:
        self._stopwatch = stopwatch
        self._names = names

    def decorate(self, part: PartT, /) -> PartT:
        """Time the calls that the part's interface names."""
        if isinstance(part, Scheduler):
            self.time_calls(part, "scheduler", SCHEDULER_CALLS)
        elif isinstance(part, Executor):
            self._time_executor(part)
        return part

    def time_calls(self, part: object, kind: str, methods: Iterable[str]) -> None:
        """Put a timer on each method."""
        for method in methods:
            self._patch(part, method, self._timed(kind, method, getattr(part, method)))

    def _time_executor(self, executor: Executor) -> None:
        execute = self._timed("executor", "execute_model", executor.execute_model)
        sample = self._timed("executor", "sample_tokens", executor.sample_tokens)

        def execute_model(output: SchedulerOutput) -> StepFuture[None]:
            return self._timed_future(execute(output))

        def sample_tokens(grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
            return self._timed_future(sample(grammar))

        self._patch(executor, "execute_model", execute_model)
        self._patch(executor, "sample_tokens", sample_tokens)

    def _timed_future(self, future: StepFuture[ResultT]) -> _TimedFuture[ResultT]:
        return _TimedFuture(future, self._timed("executor", "result", future.result))

    def _timed(self, kind: str, method: str, call: Callable[P, ResultT]) -> Callable[P, ResultT]:
        return self._stopwatch.timed(PluginPoint(kind, self._names.get(kind, ""), method), call)

    def _patch(self, part: object, method: str, timed: Callable[..., object]) -> None:
        try:
            setattr(part, method, timed)
        except AttributeError:  # a class with __slots__ and without __dict__
            logger.warning("%s takes no timers: what it costs is counted where it is called", type(part).__name__)
