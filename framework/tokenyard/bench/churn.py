"""Microseconds a step in which one request ends and another one enters, with more of them in line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.bench.admit import NUM_PREFIXES, PREFIX_STRIDE
from tokenyard.bench.decode import MAX_TOKENS, NUM_CLIENTS, NUM_SESSIONS, STAGGER, STRIDE
from tokenyard.bench.headless import SAMPLED_TOKEN, VOCAB_SIZE, sampled
from tokenyard.bench.step_times import StepTimes, figures_of, mean_us
from tokenyard.clock import MonotonicClock
from tokenyard.errors import CapacityError, UserError
from tokenyard.request import EngineCoreRequest, ServiceLevel
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

STOP_TOKEN = SAMPLED_TOKEN + 1
NUM_SETTLING_STEPS = 16  # untimed
PATIENCE = ServiceLevel(ttft=1e6, tpot=1e3, e2e=1e6)  # seconds: nobody is late, and nobody hopeless
MAX_PREFILL_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnCost:
    """Means, except where the name says otherwise; microseconds a step."""

    num_running: int
    num_waiting: int
    num_preemptions: int  # in the timed steps: by policies that take turns away
    add_us: float  # adding one request
    schedule_us: float
    update_us: float
    sum_median_us: float  # of the three together
    sum_p99_us: float
    loop_us: float  # wall time of a step, the benchmark's own part included
    timed_share: float  # of loop_us that is timed


class Churn:
    """A full batch with `num_waiting` requests behind it, whatever a policy makes of their order.

    Requests are of `NUM_CLIENTS` clients and share the first half of their prompts with every `NUM_PREFIXES`th.
    Raises UserError when the policy leaves the batch empty or blocks are too few to fill it.
    """

    def __init__(self, scheduler: Scheduler, num_requests: int, num_waiting: int, prompt_len: int) -> None:
        self.scheduler = scheduler
        self._clock = MonotonicClock()  # as the scheduler's
        self._requests = self._made(prompt_len)
        for _ in range(num_requests + num_waiting):
            scheduler.add_request(next(self._requests))
        self._fill(num_requests)
        self.run(NUM_SETTLING_STEPS)

    def run(self, num_steps: int) -> StepTimes:
        """Steps that each take in a request and end another."""
        scheduler, add, schedule, update = self.scheduler, [], [], []
        began = perf_counter()
        for _ in range(num_steps):
            request = next(self._requests)
            start = perf_counter()
            scheduler.add_request(request)
            added = perf_counter()
            output = scheduler.schedule()
            scheduled = perf_counter()
            result = _one_ended(_checked(output))
            executed = perf_counter()
            scheduler.update_from_output(_checked(output), result)
            updated = perf_counter()
            add.append(added - start)
            schedule.append(scheduled - added)
            update.append(updated - executed)
        return StepTimes(schedule, update, perf_counter() - began, add)

    def _fill(self, num_requests: int) -> None:
        """Run until all places are taken and nothing but decodes runs."""
        for _ in range(MAX_PREFILL_STEPS):
            output = _checked(self.scheduler.schedule())
            self.scheduler.update_from_output(output, sampled(output))
            if output.num_rows == output.total_num_scheduled_tokens == num_requests:
                return
        stats = self.scheduler.stats()
        raise CapacityError(
            f"only {stats.num_running} of {num_requests} requests run together ({stats.num_free_blocks} of "
            f"{stats.num_total_blocks} blocks free); raise kv_cache.num_blocks, or lower bench.num_requests"
        )

    def _made(self, prompt_len: int) -> Iterator[EngineCoreRequest]:
        """One request after the other; greedy, and ended by `STOP_TOKEN`."""
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
        number = 0
        while True:
            yield EngineCoreRequest(
                request_id=f"r{number}",
                prompt_token_ids=_prompt(number, prompt_len + number % STAGGER),
                params=params,
                arrival_time=self._clock.now(),
                stop_token_ids=(STOP_TOKEN,),
                client_id=f"client-{number % NUM_CLIENTS}",
                session_id=f"session-{number % NUM_SESSIONS}",
                service_level=PATIENCE,
            )
            number += 1


def measure_churn(
    scheduler: Scheduler, num_requests: int, num_waiting: int, prompt_len: int, num_steps: int
) -> ChurnCost:
    """Prefill everything, untimed, then time steps of a batch that turns over."""
    churn = Churn(scheduler, num_requests, num_waiting, prompt_len)
    before = scheduler.stats()
    times = churn.run(num_steps)
    after = scheduler.stats()
    return ChurnCost(
        num_running=after.num_running,
        num_waiting=after.num_waiting,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        add_us=mean_us(times.add or []),
        **figures_of(times)._asdict(),
    )


def _prompt(number: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    num_shared = length // 2
    shared = np.arange(num_shared, dtype=np.int64) + number % NUM_PREFIXES * PREFIX_STRIDE
    own = np.arange(length - num_shared, dtype=np.int64) + number * STRIDE
    return (np.concatenate([shared, own]) % VOCAB_SIZE).astype(np.int32)


def _one_ended(output: SchedulerOutput) -> ModelRunnerOutput:
    """What an executor would return: the stop token for the first row that samples."""
    result = sampled(output)
    result.token_ids[:1] = STOP_TOKEN
    return result


def _checked(output: SchedulerOutput | None) -> SchedulerOutput:
    if output is None:
        raise UserError("the scheduler schedules nothing although requests wait; can its policy admit them?")
    return output
