"""InProcessExecutor: one worker, in the engine's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tokenyard.errors import EngineDeadError, UnsupportedError
from tokenyard.executor.calls import Calls, OwnThread, SameThread
from tokenyard.interfaces.executor import (
    Executor,
    ExecutorContext,
    GrammarOutput,
    KVCachePlan,
    StepFuture,
    WorkerReport,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.config import EngineConfig
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.worker.sampled_step import SampledStep
    from tokenyard.worker.worker import Worker

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A step's tokens, which may still be on the device when the worker has gone on to the next step."""

    started: StepFuture[SampledStep]
    on_failure: Callable[[BaseException], None]

    @property
    def ready_at(self) -> float | None:
        return None

    def result(self) -> ModelRunnerOutput:
        sampled = self.started.result()
        try:
            return sampled.result()
        except Exception as error:  # of the device: what it has of the step, and of those behind it, is unknown
            self.on_failure(error)
            raise


class InProcessExecutor(Executor):
    """Under a loop with one step in flight a step has run when `execute_model` and `sample_tokens` return.

    Under one with more, everything the worker does, loading included, happens in one thread of the executor's own:
    torch keeps the number of its threads for each calling thread. A step that fails is the last: those behind it
    raise what it raised.
    """

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        self._calls: Calls = OwnThread("tokenyard-executor") if context.steps_in_flight > 1 else SameThread()
        self._worker: Worker | None = None
        self._is_unsampled = False  # a step was given to execute_model and not yet to sample_tokens
        self._failure: BaseException | None = None  # of a step

    def initialize(self, config: EngineConfig) -> WorkerReport:
        from tokenyard.worker.worker import Worker  # imports torch, which listing executors must not

        self._worker = self._calls.submit(Worker, config, self._context.on_progress).result()
        return self._calls.submit(self._worker.load).result()

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        self._calls.submit(self._running().allocate_kv_cache, plan).result()

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        worker = self._running()
        if self._is_unsampled:
            raise RuntimeError("execute_model() before sample_tokens() was called for the step before")
        future = self._calls.submit(self._in_step, worker.execute, output)
        self._is_unsampled = True
        return future

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        if grammar is not None:
            raise UnsupportedError(
                "structured outputs are not available in this version", parameter="grammar", value=grammar
            )
        if not self._is_unsampled:
            raise RuntimeError("sample_tokens() without a step that was executed and not sampled yet")
        self._is_unsampled = False
        return _Sampled(self._calls.submit(self._in_step, self._running().sample), self._note_failure)

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        return [self._calls.submit(self._running().call, name, arguments).result()]

    def check_health(self) -> None:
        if self._worker is None:
            raise EngineDeadError("the executor is not running: it was not initialized, or was shut down")
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineDeadError(f"the worker stopped on an error ({cause}); start a new engine") from self._failure

    def shutdown(self) -> None:
        self._calls.shutdown()
        self._worker = self._failure = None  # a failure's traceback holds on to the worker

    def _in_step(self, function: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Part of a step, in the worker's thread. After a failure the worker's state is unknown: nothing runs then."""
        if self._failure is not None:
            raise self._failure
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self._failure = error
            raise

    def _note_failure(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _running(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor is not running: initialize() comes first, nothing after shutdown()")
        return self._worker
