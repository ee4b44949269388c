"""InProcessExecutor: one worker, in the engine's own process and thread."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from tokenyard.errors import UnsupportedError
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
    from tokenyard.worker.worker import Worker

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """A future that is done already."""

    value: ResultT

    @property
    def ready_at(self) -> float | None:
        return None

    def result(self) -> ResultT:
        return self.value


class InProcessExecutor(Executor):
    """`execute_model` returns when the forward pass has run: no step is ever in flight."""

    def __init__(self, context: ExecutorContext) -> None:
        self._context = context
        self._worker: Worker | None = None
        self._unsampled: deque[int] = deque()

    def initialize(self, config: EngineConfig) -> WorkerReport:
        from tokenyard.worker.worker import Worker  # imports torch, which listing executors must not

        self._worker = Worker(config, self._context.on_progress)
        return self._worker.load()

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        self._ready().allocate_kv_cache(plan)

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        self._ready().execute(output)
        self._unsampled.append(output.step)
        return Done(None)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        if grammar is not None:
            raise UnsupportedError(
                "structured outputs are not available in this version", parameter="grammar", value=grammar
            )
        if not self._unsampled:
            raise RuntimeError("sample_tokens() without a step that was executed and not sampled yet")
        self._unsampled.popleft()
        return Done(self._ready().sample())

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        return [self._ready().call(name, arguments)]

    def check_health(self) -> None:
        self._ready()

    def shutdown(self) -> None:
        self._worker = None

    def _ready(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the executor is not running: initialize() comes first, nothing after shutdown()")
        return self._worker
