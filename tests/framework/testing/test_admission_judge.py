"""Work conservation under policies that say how much may run, and who first: what the judge lets pass, and what not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import planted_parts
import pytest
from tokenyard.descriptors import Descriptor, PolicyDescriptor, SchedulerDescriptor
from tokenyard.interfaces import PreemptMode, RequestView, SchedulerContext, SchedulerView, SchedulingPolicy
from tokenyard.scheduler import BatchScheduler
from tokenyard.scheduler_output import SchedulerOutput
from tokenyard.testing import ContractViolation, EngineHarness, catalogue_with


class TwoAtATime(SchedulingPolicy):
    def max_running(self, view: SchedulerView) -> int | None:
        return 2


class FiveTokens(SchedulingPolicy):
    def token_budget(self, view: SchedulerView) -> int | None:
        return 5


class OnePrefillToken(SchedulingPolicy):
    def prefill_budget(self, view: SchedulerView) -> int | None:
        return 1


class LongestFirst(SchedulingPolicy):
    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return sorted(window, key=lambda request: -request.num_prompt_tokens)


class LeavesOutTheLong(SchedulingPolicy):
    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return [request for request in window if request.num_prompt_tokens < 10 or not view.num_running]


class ChunksOfNone(SchedulingPolicy):
    def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
        return 0 if request.num_prompt_tokens > 10 and view.num_running else num_left


class PausesAllButOne(SchedulingPolicy):
    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return running[:1]

    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        return PreemptMode.PAUSE


class DisplacesAllButOne(PausesAllButOne):
    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        return PreemptMode.RECOMPUTE


POLICIES = [
    TwoAtATime,
    FiveTokens,
    OnePrefillToken,
    LongestFirst,
    LeavesOutTheLong,
    ChunksOfNone,
    PausesAllButOne,
    DisplacesAllButOne,
]


def harness(make: Callable[[], SchedulingPolicy], *parts: Descriptor[Any], scheduler: str = "batch") -> EngineHarness:
    policy = PolicyDescriptor(name="planted", api_version=(1, 7), factory=lambda options, context: make())
    overrides = ["scheduler=planted", "scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=16"]
    sizes = ["kv_cache.num_blocks=12", "kv_cache.block_size=4", "model.max_model_len=40"]
    catalogue = catalogue_with(policy, *parts)
    config = EngineHarness([*overrides, *sizes], catalogue=catalogue).config
    config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, name=scheduler))
    return EngineHarness(config=config, catalogue=catalogue)


def run(engine: EngineHarness) -> None:
    for number in range(8):
        engine.add(range(100 * number, 100 * number + (3, 14, 7)[number % 3]), max_tokens=5)
    engine.run(400)
    engine.check_idle()


@pytest.mark.parametrize("make", POLICIES)
def test_who_waits_because_the_policy_says_so_is_no_violation(make: Callable[[], SchedulingPolicy]) -> None:
    run(harness(make))


class Sleepy(BatchScheduler):
    """Runs one request less than it could, whatever its policy says."""

    def __init__(self, context: SchedulerContext) -> None:
        config = context.config
        super().__init__(dataclasses.replace(context, config=dataclasses.replace(config, max_num_seqs=1)))


@pytest.mark.parametrize("make", [TwoAtATime, LongestFirst, LeavesOutTheLong, ChunksOfNone])
def test_room_that_the_policy_did_not_ask_to_leave_is_found(make: Callable[[], SchedulingPolicy]) -> None:
    sleepy: SchedulerDescriptor[Any] = SchedulerDescriptor(
        name="sleepy", api_version=(1, 7), factory=lambda options, context: Sleepy(context), takes_policy=True
    )
    with pytest.raises(ContractViolation, match=r"progress\.work_conserving: '\d' waits \(max_num_seqs"):
        run(harness(make, sleepy, scheduler="sleepy"))


class EndsWhatItRuns(planted_parts.WrappedScheduler):
    """A row of a step loses its place in that very step."""

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        if output is None or len(output.slots) < 2:
            return output
        start = next(start for start in output.new if start.slot.index == output.slots[-1])
        wrong = dataclasses.replace(output, finished=(*output.finished, start.slot))
        self._outputs[output.step] = wrong
        return wrong


def test_a_victim_that_already_ran_in_the_step_is_found() -> None:
    part = planted_parts.scheduler(EndsWhatItRuns)
    engine = EngineHarness(["scheduler=planted"], catalogue=catalogue_with(part))
    first, second = engine.add([1, 2, 3]), engine.add([4, 5])
    with pytest.raises(ContractViolation) as caught:
        engine.step()
    assert caught.value.rule in ("slot.finished_once", "step.only_live")
    assert first != second
