"""The sync loop and the driver, with collaborators that record what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenyard.clock import VirtualClock
from tokenyard.config import EngineConfig, SchedulerConfig
from tokenyard.engine.driver import drive
from tokenyard.engine.sync import SyncEngineCore
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces import (
    EngineCoreContext,
    Executor,
    GrammarOutput,
    KVCachePlan,
    Observer,
    SchedulerContext,
    WorkerReport,
)
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler import BatchScheduler

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.scheduler_output import SchedulerOutput


@dataclass
class Later:
    """A step that is done at a time of the virtual clock."""

    value: ModelRunnerOutput
    ready_at: float | None

    def result(self) -> ModelRunnerOutput:
        return self.value


@dataclass
class TimedExecutor(Executor):
    """Each step takes a second of virtual time and samples token 7."""

    clock: VirtualClock
    fails_at: int | None = None
    is_shut_down: bool = False
    steps: list[SchedulerOutput] = field(default_factory=list)

    def initialize(self, config: EngineConfig) -> WorkerReport:
        raise NotImplementedError

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        raise NotImplementedError

    def execute_model(self, output: SchedulerOutput) -> Later:  # type: ignore[override]
        if self.fails_at == output.step:
            raise RuntimeError("the device is on fire")
        self.steps.append(output)
        return Later(self._result(output), None)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Later:
        return Later(self._result(self.steps[-1]), self.clock.now() + 1.0)

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        return []

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        num_sampled = output.samples.astype(np.int32)
        return ModelRunnerOutput(
            step=output.step, num_sampled=num_sampled, token_ids=np.full(int(num_sampled.sum()), 7, dtype=np.int32)
        )


class Recorder(Observer):
    def __init__(self, fails: bool = False) -> None:
        self.times: list[float] = []
        self.fails = fails

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.times.append(now)
        if self.fails:
            raise ValueError("observer bug")


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


def request(request_id: str, arrival: float = 0.0, max_tokens: int = 3) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(5, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        arrival_time=arrival,
    )


class SleepyScheduler(BatchScheduler):
    """Runs nothing before its time."""

    opens_at = 5.0

    def schedule(self) -> SchedulerOutput | None:
        return super().schedule() if self._clock.now() >= self.opens_at else None

    def wake_at(self) -> float | None:
        return self.opens_at if self._clock.now() < self.opens_at else None


def make(
    *,
    fails_at: int | None = None,
    observers: Sequence[Observer] = (),
    scheduler_type: type[BatchScheduler] = BatchScheduler,
) -> tuple[SyncEngineCore, TimedExecutor]:
    clock = VirtualClock()
    executor = TimedExecutor(clock, fails_at)
    scheduler = scheduler_type(
        SchedulerContext(
            config=SchedulerConfig(),
            kv_cache_manager=PagedKVCacheManager(num_blocks=64, block_size=4),
            policy=None,
            clock=clock,
            max_model_len=64,
            vocab_size=100,
            block_size=4,
            prefix_caching=True,
            seed=0,
        )
    )
    context = EngineCoreContext(scheduler=scheduler, executor=executor, clock=clock, observers=observers)
    return SyncEngineCore(context), executor


def test_time_passes_only_in_steps_and_until_the_next_arrival() -> None:
    recorder = Recorder()
    engine, executor = make(observers=[recorder])
    finished: list[str] = []
    drive(
        engine,
        executor.clock,
        lambda outputs: finished.extend(end.request_id for end in outputs.finished),
        Timetable([request("a", 0.0), request("b", 10.0)]),
    )
    assert finished == ["a", "b"]
    assert recorder.times == [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]


def test_an_arrival_during_a_step_joins_the_next_one() -> None:
    engine, executor = make()
    drive(engine, executor.clock, lambda outputs: None, Timetable([request("a", 0.0), request("b", 0.5)]))
    assert [step.num_rows for step in executor.steps] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("arrivals", "times"),
    [
        ((0.0,), [6.0, 7.0, 8.0]),  # only the scheduler knows a moment
        ((0.0, 20.0), [6.0, 7.0, 8.0, 21.0, 22.0, 23.0]),  # the scheduler's comes first
        ((0.0, 2.0), [6.0, 7.0, 8.0]),  # an arrival comes first, and nothing runs for it
    ],
)
def test_an_engine_that_waits_is_stepped_again_when_its_scheduler_asked_to_be(
    arrivals: Sequence[float], times: list[float]
) -> None:
    recorder = Recorder()
    engine, executor = make(observers=[recorder], scheduler_type=SleepyScheduler)
    requests = [request(f"r{index}", arrival) for index, arrival in enumerate(arrivals)]
    drive(engine, executor.clock, lambda outputs: None, Timetable(requests))
    assert recorder.times == times
    assert not engine.has_requests()


def test_a_paused_engine_runs_nothing_and_forgets_nothing() -> None:
    engine, _ = make()
    engine.add_request(request("a"))
    engine.pause()
    assert not engine.step().did_run
    assert engine.finish_requests(["a", "b"], FinishReason.ABORT) == ["a"]
    engine.add_request(request("c"))
    engine.resume()
    assert engine.step().request_ids == ("c",)


def test_an_engine_that_can_neither_run_nor_wait_is_reported_instead_of_hanging() -> None:
    engine, executor = make()
    engine.add_request(request("a"))
    engine.pause()
    with pytest.raises(EngineDeadError, match="neither run nor wait"):
        drive(engine, executor.clock, lambda outputs: None)


def test_a_failed_step_ends_the_engine_and_every_later_call_says_why() -> None:
    engine, executor = make(fails_at=1)
    engine.add_request(request("a"))
    with pytest.raises(EngineDeadError, match="on fire"):
        drive(engine, executor.clock, lambda outputs: None)
    assert not engine.has_requests()
    for call in (engine.step, lambda: engine.add_request(request("b")), engine.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="on fire"):
            call()
    engine.shutdown()
    assert executor.is_shut_down


def test_an_observer_that_fails_is_switched_off_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder(fails=True), Recorder()
    engine, executor = make(observers=[bad, good])
    engine.add_request(request("a"))
    drive(engine, executor.clock, lambda outputs: None)
    assert (len(bad.times), len(good.times)) == (1, 3)
    assert "Recorder failed" in caplog.text


def test_shutdown_is_final_and_may_be_repeated() -> None:
    engine, executor = make()
    engine.shutdown()
    engine.shutdown()
    assert executor.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.step()
