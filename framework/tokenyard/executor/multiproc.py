"""MultiprocExecutor: a worker process for each rank; several ranks share the model (tensor parallelism)."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tokenyard.errors import EngineDeadError, TokenyardError, UnsupportedError
from tokenyard.executor.multiproc_ranks import RankProcesses
from tokenyard.interfaces.executor import (
    Executor,
    ExecutorContext,
    GrammarOutput,
    KVCachePlan,
    StepFuture,
    WorkerReport,
)
from tokenyard.ipc.config_values import worker_values
from tokenyard.ipc.failures import error_from_message
from tokenyard.ipc.handshake import components_of, own_identity
from tokenyard.ipc.log_format import own_log_format
from tokenyard.ipc.reports import ReportMessage, plan_to_message, report_from_message
from tokenyard.ipc.steps import StepResultMessage, result_from_message, step_to_message
from tokenyard.ipc.worker_messages import (
    CallMessage,
    FailureMessage,
    JoinMessage,
    ProgressMessage,
    RefusalMessage,
    ReturnMessage,
)
from tokenyard.model.files import resolve_model
from tokenyard.model.tensor_parallel import check_tensor_parallel_size
from tokenyard.plugins import load_catalogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.config import EngineConfig
    from tokenyard.ipc.failures import ErrorMessage
    from tokenyard.ipc.worker_messages import FromWorker
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

ReplyT = TypeVar("ReplyT")

_ROOT_CAUSE_SECONDS = 1.0  # in which the end of a rank is noticed that another one has lost


class RankFailedError(Exception):
    """A rank said that it cannot go on."""

    def __init__(self, rank: int, message: FailureMessage) -> None:
        super().__init__(rank, message)
        self.rank = rank
        self.message = message


class Step:
    """A step that was handed to the workers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.output: ModelRunnerOutput | None = None


@dataclass(frozen=True, slots=True)
class _Executed:
    """The forward pass of a step: known to be done when its tokens are there."""

    executor: MultiprocExecutor
    step: Step

    @property
    def ready_at(self) -> float | None:
        return None

    def result(self) -> None:
        self.executor.wait_for(self.step)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A step's tokens."""

    executor: MultiprocExecutor
    step: Step

    @property
    def ready_at(self) -> float | None:
        return None

    def result(self) -> ModelRunnerOutput:
        return self.executor.wait_for(self.step)


class MultiprocExecutor(Executor):
    """A step goes to all ranks as one message, and its tokens come back from rank 0, which samples.

    Nothing waits but `result` of a step, so that any number of steps may be in flight; workers run them in order. What
    a worker raises in a step, or its death, ends all of them: the steps in flight and those behind raise it.
    """

    def __init__(self, context: ExecutorContext, *, collective_timeout: float = 60.0) -> None:
        """`collective_timeout`: seconds that ranks wait for each other within a step."""
        self._context = context
        self._collective_timeout = collective_timeout
        self._ranks: RankProcesses | None = None
        self._process = os.getpid()
        self._unsampled: Step | None = None  # given to execute_model and not yet to sample_tokens
        self._in_flight: deque[Step] = deque()
        self._replies: list[deque[object]] = []  # of each rank, but for results of steps
        self._failure: BaseException | None = None

    @property
    def pids(self) -> list[int]:
        """Of the worker processes, in rank order."""
        return [] if self._ranks is None else self._ranks.pids

    def initialize(self, config: EngineConfig) -> WorkerReport:
        size = config.executor.tensor_parallel_size
        files = resolve_model(config.model.name, self._context.on_progress, revision=config.model.revision)
        check_tensor_parallel_size(files, size)
        ranks = self._ranks = RankProcesses(size)
        self._replies = [deque() for _ in range(size)]
        join = self._join_message(config, ranks)
        for rank in range(size):
            ranks.send(rank, msgspec.structs.replace(join, rank=rank))
        return _least([report_from_message(reply) for reply in self._ask(ReportMessage)])

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        ranks = self._running()
        ranks.send_all(plan_to_message(plan))
        self._ask(ReturnMessage)
        ranks.forget_folder()

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        ranks = self._running()
        if self._unsampled is not None:
            raise RuntimeError("execute_model() before sample_tokens() was called for the step before")
        ranks.send_all(step_to_message(output))
        self._unsampled = step = Step(output.step)
        self._in_flight.append(step)
        return _Executed(self, step)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        """Workers need not be told: without grammars they sample as soon as they have executed."""
        if grammar is not None:
            raise UnsupportedError(
                "structured outputs are not available in this version", parameter="grammar", value=grammar
            )
        step, self._unsampled = self._unsampled, None
        if step is None:
            raise RuntimeError("sample_tokens() without a step that was executed and not sampled yet")
        return _Sampled(self, step)

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        self._running().send_all(CallMessage(name, tuple(arguments)))
        return [reply.value for reply in self._ask(ReturnMessage)]

    def check_health(self) -> None:
        """May be called from any thread."""
        ranks, failure = self._ranks, self._failure
        if ranks is None:
            raise EngineDeadError("the executor is not running: it was not initialized, or was shut down")
        if failure is not None:
            raise EngineDeadError(f"the workers stopped on an error ({failure}); start a new engine") from failure
        ranks.check()

    def shutdown(self) -> None:
        if os.getpid() != self._process:
            return  # the workers are another process's
        ranks, self._ranks = self._ranks, None
        self._failure = self._unsampled = None
        self._in_flight.clear()
        if ranks is not None:
            ranks.stop()

    def wait_for(self, step: Step) -> ModelRunnerOutput:
        """The result of a step; raises what ended the workers before it was there."""
        while step.output is None:
            if self._ranks is None:
                raise EngineDeadError("the executor was shut down before this step was done")
            self._receive(self._ranks)
        return step.output

    def _join_message(self, config: EngineConfig, ranks: RankProcesses) -> JoinMessage:
        """For rank 0."""
        return JoinMessage(
            identity=own_identity(),
            components=components_of(load_catalogue(config.plugins)),
            config=worker_values(config),
            rank=0,
            num_ranks=len(ranks),
            folder=ranks.folder,
            collective_timeout=self._collective_timeout,
            root_log_level=logging.getLogger().getEffectiveLevel(),
            log_level=logging.getLogger("tokenyard").getEffectiveLevel(),
            log_format=own_log_format(),
        )

    def _ask(self, expected: type[ReplyT]) -> list[ReplyT]:
        """The next reply of each rank, in rank order; raises the first refusal."""
        ranks = self._running()
        while not all(self._replies):
            self._receive(ranks)
        replies = [replies.popleft() for replies in self._replies]
        for rank, reply in enumerate(replies):
            if isinstance(reply, RefusalMessage):
                raise _error_of_rank(reply.error, self._name(rank))
        found = [reply for reply in replies if isinstance(reply, expected)]
        if len(found) < len(replies):
            raise EngineDeadError(f"a worker answered with {[type(reply).__name__ for reply in replies]}")
        return found

    def _receive(self, ranks: RankProcesses) -> None:
        """Wait for messages and take them in; raises what ends the workers."""
        if self._failure is not None:
            raise self._failure
        try:
            for rank, message in ranks.receive():
                self._take(rank, message)
        except RankFailedError as failure:
            self._failure = self._root_cause(ranks, failure)
        except Exception as error:
            self._failure = error
        if self._failure is not None:
            ranks.ask_to_end()  # what the others have of the step is unknown
            raise self._failure

    def _take(self, rank: int, message: FromWorker) -> None:
        if isinstance(message, FailureMessage):
            raise RankFailedError(rank, message)
        if isinstance(message, ProgressMessage):
            if self._context.on_progress is not None:
                self._context.on_progress(message.text)
        elif isinstance(message, StepResultMessage):
            self._end_step(message)
        else:
            self._replies[rank].append(message)

    def _end_step(self, message: StepResultMessage) -> None:
        step = self._in_flight.popleft()
        if step.number != message.step:
            raise EngineDeadError(f"the result of step {message.step} came in place of that of step {step.number}")
        step.output = result_from_message(message)

    def _root_cause(self, ranks: RankProcesses, failure: RankFailedError) -> BaseException:
        """A rank that lost another one knows less than the other's own last words, or its end, tell."""
        deadline = time.monotonic() + _ROOT_CAUSE_SECONDS
        while failure.message.is_lost_rank and (left := deadline - time.monotonic()) > 0:
            try:
                found = ranks.receive(left)
            except EngineDeadError as death:
                return death
            for rank, message in found:
                if isinstance(message, FailureMessage) and not message.is_lost_rank:
                    failure = RankFailedError(rank, message)
        return _error_of_rank(failure.message.error, self._name(failure.rank))

    def _name(self, rank: int) -> str:
        """What stands before a rank's errors."""
        return f"rank {rank}: " if len(self._replies) > 1 else ""

    def _running(self) -> RankProcesses:
        if os.getpid() != self._process:
            raise EngineDeadError("an engine does not live on in a forked process; start one there")
        if self._ranks is None:
            raise RuntimeError("the executor is not running: initialize() comes first, nothing after shutdown()")
        return self._ranks


def _least(reports: Sequence[WorkerReport]) -> WorkerReport:
    """What all ranks can do: that of rank 0, with the memory of the one that has least."""
    return replace(reports[0], available_bytes=min(report.available_bytes for report in reports))


def _error_of_rank(message: ErrorMessage, name: str) -> TokenyardError:
    """What a rank raised, of that class where it is one of ours."""
    error = error_from_message(msgspec.structs.replace(message, message=f"{name}{message.message}"))
    return error if isinstance(error, TokenyardError) else EngineDeadError(f"{name}{message.kind}: {message.message}")
