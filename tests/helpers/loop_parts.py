"""Parts for tests of the engine loops: an executor on a virtual clock, schedulers that write down what is asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tokenyard.clock import VirtualClock
from tokenyard.config import EngineConfig, SchedulerConfig
from tokenyard.engine.loop import EngineLoop
from tokenyard.engine.overlap import OverlapEngineCore
from tokenyard.engine.sync import SyncEngineCore
from tokenyard.engine_outputs import EngineCoreOutputs, FinishedRequest, SchedulerStats
from tokenyard.interfaces import (
    EngineCoreContext,
    Executor,
    GrammarOutput,
    KVCachePlan,
    Observer,
    Scheduler,
    SchedulerContext,
    SchedulingPolicy,
    WorkerReport,
)
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler import BatchScheduler
from tokenyard.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from tokenyard.interfaces import StepFuture

VOCAB = 1000
LOOPS: dict[str, Callable[[EngineCoreContext], EngineLoop]] = {
    "sync": SyncEngineCore,
    "overlap": OverlapEngineCore,
    "overlap, 4 deep": lambda context: OverlapEngineCore(context, depth=4),
}


def token_of(request_id: str, position: int) -> int:
    """What every executor here samples: it depends on nothing but the request and the place."""
    return (sum(request_id.encode()) * 31 + position * 7919) % (VOCAB - 10) + 10


@dataclass
class Later:
    """A step that is done at a time of the virtual clock, or fails then."""

    value: ModelRunnerOutput
    ready_at: float | None
    on_result: Callable[[], None] = lambda: None

    def result(self) -> ModelRunnerOutput:
        self.on_result()
        return self.value


@dataclass
class TimedExecutor(Executor):
    """Each step takes a second of virtual time, one after the other; `log` names each call with its step."""

    clock: VirtualClock
    fails_at: int | None = None
    error: BaseException = field(default_factory=lambda: RuntimeError("the device is on fire"))
    log: list[str] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)
    is_shut_down: bool = False
    _busy_until: float = 0.0
    _names: dict[int, str] = field(default_factory=dict)  # slot -> request id

    def initialize(self, config: EngineConfig) -> WorkerReport:
        raise NotImplementedError

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        raise NotImplementedError

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        self.log.append(f"execute {output.step}")
        for start in (*output.new, *output.resumed):
            self._names[start.slot.index] = start.request_id
        self.steps.append(output)
        return Later(self._result(output), None)  # type: ignore[return-value]

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        output = self.steps[-1]
        self._busy_until = max(self._busy_until, self.clock.now()) + 1.0
        return Later(self._result(output), self._busy_until, lambda: self._land(output.step))

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        return []

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _land(self, step: int) -> None:
        self.log.append(f"land {step}")
        if step == self.fails_at:
            raise self.error

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        ends = output.num_computed_tokens + output.num_scheduled_tokens
        tokens = [
            token_of(self._names[slot], end)
            for slot, end, samples in zip(output.slots.tolist(), ends.tolist(), output.samples.tolist(), strict=True)
            if samples
        ]
        return ModelRunnerOutput(
            step=output.step,
            num_sampled=output.samples.astype(np.int32),
            token_ids=np.array(tokens, dtype=np.int32),
        )


class OldScheduler(Scheduler):
    """Written for plugin API 1.1: no deadlines, no paused admission. A step a token, for all requests at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._left: dict[str, int] = {}  # tokens that were not scheduled yet
        self._missing: dict[str, int] = {}  # tokens that were not delivered yet
        self._rows: deque[list[str]] = deque()
        self._num_steps = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        if not isinstance(request.params, SamplingParams) or request.params.max_tokens is None:
            raise TypeError("tests say how many tokens they want")
        self._left[request.request_id] = self._missing[request.request_id] = request.params.max_tokens

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        ended = [request_id for request_id in request_ids if self._missing.pop(request_id, None) is not None]
        for request_id in ended:
            del self._left[request_id]
        return ended

    def schedule(self) -> SchedulerOutput | None:
        rows = [request_id for request_id, left in self._left.items() if left]
        if not rows:
            return None
        for request_id in rows:
            self._left[request_id] -= 1
        self._rows.append(rows)
        self.log.append(f"schedule {self._num_steps}")
        self._num_steps += 1
        zeros = np.zeros(len(rows), dtype=np.int32)  # this worker needs to know the step's number, and no more
        return SchedulerOutput(
            step=self._num_steps - 1,
            slots=zeros.astype(np.int64),
            generations=zeros,
            num_computed_tokens=zeros,
            num_scheduled_tokens=zeros + 1,
            samples=zeros.astype(np.bool_),
        )

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        self.log.append(f"update {output.step}")
        rows = [request_id for request_id in self._rows.popleft() if request_id in self._missing]
        for request_id in rows:
            self._missing[request_id] -= 1
        ended = [request_id for request_id in rows if not self._missing[request_id]]
        self.finish_requests(ended, FinishReason.LENGTH)
        return EngineCoreOutputs(
            request_ids=rows,
            num_tokens=np.ones(len(rows), dtype=np.int32),
            token_ids=np.full(len(rows), 7, dtype=np.int32),
            finished=[FinishedRequest(request_id=request_id, reason=FinishReason.LENGTH) for request_id in ended],
        )

    def has_requests(self) -> bool:
        return bool(self._missing)

    def reset_prefix_cache(self) -> bool:
        return True

    def wake_at(self) -> float | None:
        return None

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._missing),
            num_waiting=0,
            num_steps=self._num_steps,
            num_preemptions=0,
            num_prompt_tokens=0,
            num_generation_tokens=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_free_blocks=0,
            num_total_blocks=0,
        )


class Recorder(Observer):
    """Writes down the steps that it is told of, and when."""

    def __init__(self, fails: bool = False) -> None:
        self.steps: list[int] = []
        self.times: list[float] = []
        self.results: list[EngineCoreOutputs] = []
        self.num_shutdowns = 0
        self.fails = fails

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.steps.append(output.step)
        self.times.append(now)
        self.results.append(result)
        if self.fails:
            raise ValueError("observer bug")

    def on_shutdown(self) -> None:
        self.num_shutdowns += 1


@dataclass
class Timetable:
    """Requests by arrival time."""

    requests: list[EngineCoreRequest]
    event: None = None

    def due(self, now: float) -> list[EngineCoreRequest]:
        ready = [request for request in self.requests if request.arrival_time <= now]
        self.requests = [request for request in self.requests if request.arrival_time > now]
        return ready

    def next_time(self) -> float | None:
        return min((request.arrival_time for request in self.requests), default=None)

    def is_exhausted(self) -> bool:
        return not self.requests


@dataclass
class Inbox:
    """What an engine has delivered."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, FinishedRequest] = field(default_factory=dict)

    def take(self, outputs: EngineCoreOutputs) -> None:
        start = 0
        for request_id, count in zip(outputs.request_ids, outputs.num_tokens.tolist(), strict=True):
            if request_id in self.ended:
                raise RuntimeError(f"{request_id} got a token after its end")
            self.tokens.setdefault(request_id, []).extend(outputs.token_ids[start : start + count].tolist())
            start += count
        for end in outputs.finished:
            if end.request_id in self.ended:
                raise RuntimeError(f"{end.request_id} ended twice")
            self.ended[end.request_id] = end


@dataclass
class Rig:
    """An engine loop with everything around it in reach."""

    engine: EngineLoop
    executor: TimedExecutor
    clock: VirtualClock
    kv: PagedKVCacheManager
    inbox: Inbox = field(default_factory=Inbox)

    def step(self) -> EngineCoreOutputs:
        outputs = self.engine.step()
        self.inbox.take(outputs)
        return outputs

    def run(self) -> None:
        """Until no request is left; then nothing may hold a block."""
        while self.engine.has_requests():
            if not self.step().did_run:
                raise RuntimeError(f"stuck: {self.engine.stats()}")
        self.check_idle()

    def check_idle(self) -> None:
        free, total = self.kv.usage
        if free != total or self.engine.has_requests():
            raise RuntimeError(f"{total - free} blocks are held by nobody: {self.engine.stats()}")


def request(
    request_id: str, arrival: float = 0.0, max_tokens: int = 3, num_prompt: int = 5, deadline: float | None = None
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(num_prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        arrival_time=arrival,
        deadline=deadline,
    )


def make_rig(
    loop: str = "sync",
    *,
    scheduler: Scheduler | None = None,
    scheduler_type: type[BatchScheduler] = BatchScheduler,
    policy: SchedulingPolicy | None = None,
    observers: Sequence[Observer] = (),
    fails_at: int | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
) -> Rig:
    """A loop around the real scheduler and K/V manager, or around `scheduler`."""
    clock = VirtualClock()
    executor = TimedExecutor(clock, fails_at)
    kv = PagedKVCacheManager(num_blocks=num_blocks, block_size=block_size)
    scheduler = scheduler or scheduler_type(
        SchedulerContext(
            config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            kv_cache_manager=kv,
            policy=policy,
            clock=clock,
            max_model_len=64,
            vocab_size=VOCAB,
            block_size=block_size,
            prefix_caching=True,
            seed=0,
        )
    )
    context = EngineCoreContext(scheduler=scheduler, executor=executor, clock=clock, observers=observers)
    return Rig(LOOPS[loop](context), executor, clock, kv)
