"""Microseconds a step of steady decoding: everything between two executor calls."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.bench.headless import VOCAB_SIZE, sampled, sampled_ahead
from tokenyard.bench.step_times import StepTimes, figures_of
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
NUM_CLIENTS, NUM_SESSIONS = 8, 64  # for policies that tell them apart
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


def decode_requests(num_requests: int, prompt_len: int) -> list[EngineCoreRequest]:
    """The requests that decode together; greedy, and ended by nothing but their length."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
    return [
        EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=_prompt(number * STRIDE, prompt_len + number % STAGGER),
            params=params,
            arrival_time=0.0,
            client_id=f"client-{number % NUM_CLIENTS}",
            session_id=f"session-{number % NUM_SESSIONS}",
        )
        for number in range(num_requests)
    ]


def _prompt(first: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return ((np.arange(length, dtype=np.int64) + first) % VOCAB_SIZE).astype(np.int32)


def blocks_needed(num_requests: int, prompt_len: int, num_steps: int, block_size: int) -> int:
    """Blocks that so many requests hold at the end of the timed steps, had each been alone in prefill."""
    longest = (prompt_len + number % STAGGER + num_steps + 1 for number in range(num_requests))
    return sum(-(-tokens // block_size) for tokens in longest)


class SteadyBatch:
    """Requests that decode together. Raises UserError when the batch changes: its figures would be of something else.

    At most `scheduler.max_num_seqs` of the requests run, and the others wait.
    """

    def __init__(self, scheduler: Scheduler, requests: Sequence[EngineCoreRequest]) -> None:
        self.scheduler = scheduler
        for request in requests:
            scheduler.add_request(request)
        self._last = _prefill(scheduler)
        self._first = scheduler.stats()

    def run(self, num_steps: int) -> StepTimes:
        """Steps that each decode a token of every running request."""
        # Made before: making results is the executor's work and no part of the loop that is measured.
        results = sampled_ahead(self._last, num_steps)
        times, self._last = _timed_steps(self.scheduler, self._last, results)
        stats = self.scheduler.stats()
        if stats.num_preemptions != self._first.num_preemptions or stats.num_running != self._first.num_running:
            raise _not_steady(self.scheduler)
        return times


def measure_decode(scheduler: Scheduler, requests: Sequence[EngineCoreRequest], num_steps: int) -> DecodeCost:
    """Prefill everything, untimed, then time steps of a `SteadyBatch`."""
    times = SteadyBatch(scheduler, requests).run(num_steps)
    stats = scheduler.stats()
    return DecodeCost(num_running=stats.num_running, num_waiting=stats.num_waiting, **figures_of(times)._asdict())


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


def _timed_steps(
    scheduler: Scheduler, last: SchedulerOutput, results: Sequence[ModelRunnerOutput]
) -> tuple[StepTimes, SchedulerOutput]:
    """The steps behind `last`, one for each result, and the last of them."""
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
        last = output
    return StepTimes(schedule, update, perf_counter() - began), last


def _not_steady(scheduler: Scheduler) -> CapacityError:
    stats = scheduler.stats()
    return CapacityError(
        f"the batch did not stay as it was ({stats.num_running} running, {stats.num_waiting} waiting, "
        f"{stats.num_preemptions} preempted, {stats.num_free_blocks} of {stats.num_total_blocks} blocks free), so a "
        "step has no steady cost; raise kv_cache.num_blocks or model.max_model_len, or lower bench.num_steps"
    )
