"""ScriptedExecutor: no model; a script says what is sampled."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np

from tokenyard.errors import ConfigError
from tokenyard.interfaces.executor import Executor, KVCacheGroupSpec, KVCachePlan, StepFuture, WorkerReport
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.inputs import checked_seconds, script_tokens
from tokenyard.testing.memory import TokenChain
from tokenyard.testing.scripted_logprobs import prompt_logprobs, sampled_logprobs
from tokenyard.testing.worker_side import StepRow, WorkerLimits, WorkerSide, WorkerStep

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.executor import GrammarOutput
    from tokenyard.request import EngineCoreRequest
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.testing.inputs import StepSeconds

ResultT = TypeVar("ResultT")

Script: TypeAlias = Mapping[str, Sequence[int]] | Callable[[str], Sequence[int] | None] | None
"""What is sampled, by request id. An id that is left out, and None, get one token that depends on id and position.

A function is asked only for rows whose request has not ended."""


@dataclass(slots=True)
class ScriptedFuture(Generic[ResultT]):
    """Runs its step when it is asked for the result."""

    _compute: Callable[[], ResultT]
    ready_at: float | None = None
    _done: list[ResultT] = field(default_factory=list)  # the result, once there is one

    def result(self) -> ResultT:
        if not self._done:
            self._done.append(self._compute())
        return self._done[0]


class ScriptedExecutor(Executor):
    """Runs a step when its result is asked for, with the `script` that is set then.

    It knows from the SchedulerOutputs alone what a worker knows (slots, tokens, block tables), keeps what each K/V
    block would hold, and raises ContractViolation at a step that a worker could not run rightly. That violation is kept
    in `violation`, since a loop may turn it into an error of its own. `step_seconds` says how long each step takes on
    `clock`, as a number or by what it computes. Log probabilities are those of `scripted_logprobs.logprob_of`.
    """

    def __init__(
        self, limits: WorkerLimits, *, vocab_size: int, clock: Clock, step_seconds: StepSeconds = None
    ) -> None:
        self.worker = WorkerSide(limits, self._make_chain)
        self.script: Script = None
        self.errors: Mapping[str, str] = {}  # request id -> why it alone fails in the step that lands next
        self.failure: BaseException | None = None  # raised by the step that lands next
        self.violation: ContractViolation | None = None
        self.script_error: Exception | None = None  # what a script raised: the test's own mistake, not the engine's
        self.executed: list[SchedulerOutput] = []  # since `begin_turn`
        self.landed: list[WorkerStep] = []  # since `begin_turn`
        self.on_execute: Callable[[SchedulerOutput], None] = lambda output: None
        self.num_shutdowns = 0
        self._vocab_size = vocab_size
        self._clock = clock
        self._step_seconds = step_seconds
        self._ready_at = clock.now()
        self._requests: dict[str, EngineCoreRequest] = {}
        self._unsampled: deque[WorkerStep] = deque()
        self._results: dict[int, ModelRunnerOutput] = {}

    def expect(self, request: EngineCoreRequest) -> None:
        """Tell what a worker does not see of a request: which tokens end it, and what separates its content."""
        self._requests[request.request_id] = request
        self.worker.forget(request.request_id)

    def begin_turn(self, script: Script, errors: Mapping[str, str]) -> None:
        """A turn of the loop begins; what lands in it follows `script`."""
        self.script, self.errors = script, errors
        self.executed, self.landed = [], []

    # Executor

    def initialize(self, config: EngineConfig) -> WorkerReport:
        return WorkerReport(
            kv_cache_groups=tuple(
                KVCacheGroupSpec(num_layers=1, bytes_per_token=1, sliding_window=window)
                for window in self.worker.limits.group_windows
            ),
            available_bytes=self.worker.limits.num_blocks * self.worker.limits.block_size,
            vocab_size=self._vocab_size,
            decoder="scripted",
            attention_backend="none",
            device="none",
            dtype="none",
            load_seconds=0.0,
        )

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        """There is nothing to allocate."""

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        try:
            self._refuse_after_shutdown("execute_model")
            self._unsampled.append(self.worker.arrive(output))
            self.on_execute(output)
        except ContractViolation as violation:
            self._keep(violation)
        self.executed.append(output)
        return ScriptedFuture(lambda: None)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        if not self._unsampled:
            self._keep(
                ContractViolation("executor.one_sample", "sample_tokens() without a step that was executed before")
            )
        output = self._unsampled.popleft().output
        number = output.step
        if self._step_seconds is None:
            return ScriptedFuture(lambda: self._result(number))
        seconds = self._step_seconds(output) if callable(self._step_seconds) else self._step_seconds
        self._ready_at = max(self._ready_at, self._clock.now()) + checked_seconds("step_seconds", seconds)
        return ScriptedFuture(lambda: self._result(number), self._ready_at)

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        raise ConfigError(f"unknown function '{name}'; a scripted executor publishes none")

    def check_health(self) -> None:
        self._refuse_after_shutdown("check_health")

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    # Results

    def _result(self, number: int) -> ModelRunnerOutput:
        """Steps run strictly in order, so what is before this one runs first."""
        while number not in self._results:
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            if not self.worker.in_flight:
                raise ContractViolation("executor.order", f"the result of step {number} is asked for but it never ran")
            self._land()
        return self._results.pop(number)

    def _land(self) -> None:
        try:
            step = self.worker.land(self._sample)
        except ContractViolation as violation:
            self._keep(violation)
        self.landed.append(step)
        rows = [row.sampled for row in step.rows]
        ids = {row.held.request_id for row in step.rows}
        self._results[step.output.step] = ModelRunnerOutput(
            step=step.output.step,
            num_sampled=np.array([len(row) for row in rows], dtype=np.int32),
            token_ids=np.array([token for row in rows for token in row], dtype=np.int32),
            logprobs=sampled_logprobs(step, self._vocab_size),
            prompt_logprobs=prompt_logprobs(step, self._vocab_size),
            errors={request_id: text for request_id, text in self.errors.items() if request_id in ids},
        )

    def _sample(self, row: StepRow) -> Sequence[int]:
        request_id = row.held.request_id
        tokens = None if row.held.has_ended else self._scripted(request_id)
        return [self._default_token(request_id, row.end)] if tokens is None else tokens

    def _scripted(self, request_id: str) -> list[int] | None:
        script = self.script
        try:
            tokens = script(request_id) if callable(script) else (script or {}).get(request_id)
            return None if tokens is None else script_tokens(request_id, tokens, self._vocab_size)
        except Exception as error:
            self.script_error = error
            raise

    def _default_token(self, request_id: str, position: int) -> int:
        request = self._requests.get(request_id)
        ends = frozenset[int]() if request is None else frozenset((*request.stop_token_ids, *request.eos_token_ids))
        token = zlib.crc32(f"{request_id}/{position}".encode()) % self._vocab_size
        for _ in range(self._vocab_size):
            if token not in ends:
                return token
            token = (token + 1) % self._vocab_size
        raise ConfigError(f"vocab_size={self._vocab_size} leaves no token that ends nothing; raise it")

    def _make_chain(self, request_id: str) -> TokenChain:
        request = self._requests.get(request_id)
        if request is None:
            return TokenChain()
        return TokenChain(repr((request.cache_salt, request.lora_name)), request.extra_keys)

    def _refuse_after_shutdown(self, what: str) -> None:
        if self.num_shutdowns:
            raise ContractViolation("executor.after_shutdown", f"{what}() after shutdown()")

    def _keep(self, violation: ContractViolation) -> NoReturn:
        self.violation = self.violation or violation
        raise violation
