"""Microseconds a step of steady decoding: everything between two executor calls."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.bench.headless import VOCAB_SIZE, sampled, sampled_ahead
from tokenyard.errors import CapacityError, UserError
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

STAGGER = 16  # prompts of prompt_len + 0 .. 15 tokens, so that block boundaries spread over the steps
MAX_TOKENS = 4000
STRIDE = 7919  # token j of request i is (i * STRIDE + j) % VOCAB_SIZE: no two prompts begin alike


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Means, except where the name says otherwise; microseconds a step."""

    num_running: int
    num_waiting: int
    schedule_us: float
    update_us: float
    sum_median_us: float
    sum_p99_us: float
    loop_us: float  # wall time of a step, the benchmark's own part included
    timed_share: float  # of loop_us that is schedule and update


class _Times(NamedTuple):
    """Seconds."""

    schedule: list[float]  # [num_steps]
    update: list[float]  # [num_steps]
    loop: float


def decode_requests(num_requests: int, prompt_len: int) -> list[EngineCoreRequest]:
    """The requests that decode together; greedy, and ended by nothing but their length."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
    return [
        EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=_prompt(number * STRIDE, prompt_len + number % STAGGER),
            params=params,
            arrival_time=0.0,
        )
        for number in range(num_requests)
    ]


def _prompt(first: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return ((np.arange(length, dtype=np.int64) + first) % VOCAB_SIZE).astype(np.int32)


def blocks_needed(num_requests: int, prompt_len: int, num_steps: int, block_size: int) -> int:
    """Blocks that so many requests hold at the end of the timed steps, had each been alone in prefill."""
    longest = (prompt_len + number % STAGGER + num_steps + 1 for number in range(num_requests))
    return sum(-(-tokens // block_size) for tokens in longest)


def measure_decode(scheduler: Scheduler, requests: Sequence[EngineCoreRequest], num_steps: int) -> DecodeCost:
    """Prefill everything, untimed, then time steps of a batch that does not change.

    Raises UserError when it changes: then the figures would be of something else.
    """
    for request in requests:
        scheduler.add_request(request)
    last = _prefill(scheduler)
    before = scheduler.stats()
    times = _timed_steps(scheduler, last, sampled_ahead(last, num_steps))
    after = scheduler.stats()
    if after.num_preemptions != before.num_preemptions or after.num_running != before.num_running:
        raise _not_steady(scheduler)
    return _cost(times, after.num_running, after.num_waiting)


def _prefill(scheduler: Scheduler) -> SchedulerOutput:
    """Run until a step does nothing but decode; returns that step."""
    while True:
        output = scheduler.schedule()
        if output is None:
            raise UserError("the scheduler schedules nothing although requests wait; can its policy admit them?")
        scheduler.update_from_output(output, sampled(output))
        starts = len(output.new) + len(output.resumed)
        if not starts and bool(output.samples.all()) and int(output.num_scheduled_tokens.max()) == 1:
            return output


def _timed_steps(scheduler: Scheduler, last: SchedulerOutput, results: Sequence[ModelRunnerOutput]) -> _Times:
    """The results were made before: making them is the executor's work and no part of the loop that is measured."""
    schedule, update, num_rows = [], [], last.num_rows
    began = perf_counter()
    for result in results:
        start = perf_counter()
        output = scheduler.schedule()
        scheduled = perf_counter()
        if output is None or output.num_rows != num_rows:
            raise _not_steady(scheduler)
        if result.step != output.step:  # a scheduler that numbers its steps in another way
            result = sampled(output)
        executed = perf_counter()
        scheduler.update_from_output(output, result)
        updated = perf_counter()
        schedule.append(scheduled - start)
        update.append(updated - executed)
    return _Times(schedule, update, perf_counter() - began)


def _not_steady(scheduler: Scheduler) -> CapacityError:
    stats = scheduler.stats()
    return CapacityError(
        f"the batch did not stay as it was ({stats.num_running} running, {stats.num_waiting} waiting, "
        f"{stats.num_preemptions} preempted, {stats.num_free_blocks} of {stats.num_total_blocks} blocks free), so a "
        "step has no steady cost; raise kv_cache.num_blocks or model.max_model_len, or lower bench.num_steps"
    )


def _cost(times: _Times, num_running: int, num_waiting: int) -> DecodeCost:
    num_steps = len(times.schedule)
    both = sorted(schedule + update for schedule, update in zip(times.schedule, times.update, strict=True))
    return DecodeCost(
        num_running=num_running,
        num_waiting=num_waiting,
        schedule_us=_us(sum(times.schedule) / num_steps),
        update_us=_us(sum(times.update) / num_steps),
        sum_median_us=_us(both[num_steps // 2]),
        sum_p99_us=_us(both[int(num_steps * 0.99)]),
        loop_us=_us(times.loop / num_steps),
        timed_share=round(sum(both) / times.loop, 3),
    )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
