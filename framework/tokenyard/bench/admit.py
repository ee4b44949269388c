"""Milliseconds to take in many waiting requests, half of whose prompts the prefix cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.bench.decode import STRIDE
from tokenyard.bench.headless import VOCAB_SIZE, sampled
from tokenyard.errors import CapacityError
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.scheduler_output import SchedulerOutput

NUM_PREFIXES = 10
PREFIX_STRIDE = 131
WARM_TAIL, TIMED_TAIL = 11, 23  # what tells the tails of the two rounds of prompts apart


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmitCost:
    """Milliseconds for all requests together.

    Blocks are hashed wherever the K/V manager does it: while it looks a prompt up (`schedule_ms`) or when it publishes
    what was computed (`update_ms`). `total_ms` counts both.
    """

    make_ms: float  # prompts as lists of token ids into EngineCoreRequests, making the lists included
    add_ms: float  # Scheduler.add_request
    schedule_ms: float  # the step that admits them all
    update_ms: float  # taking in that step's tokens
    total_ms: float
    scheduled_tokens: int  # what the prefix cache did not save


def measure_admit(scheduler: Scheduler, num_requests: int, prompt_len: int) -> AdmitCost:
    """Fill the prefix cache with one round of requests, untimed, then time a second one with the same prefixes."""
    prefixes = [
        [(group * PREFIX_STRIDE + position) % VOCAB_SIZE for position in range(prompt_len // 2)]
        for group in range(NUM_PREFIXES)
    ]
    warm = _requests("warm", prefixes, num_requests, prompt_len, WARM_TAIL)
    _add(scheduler, warm)
    _take_in(scheduler, _schedule_all(scheduler, num_requests))
    scheduler.finish_requests([request.request_id for request in warm], FinishReason.ABORT)
    scheduler.schedule()  # nothing runs: a scheduler may settle what has ended only now
    del warm
    start = perf_counter()
    requests = _requests("r", prefixes, num_requests, prompt_len, TIMED_TAIL)
    made = perf_counter()
    _add(scheduler, requests)
    added = perf_counter()
    output = _schedule_all(scheduler, num_requests)
    scheduled = perf_counter()
    update = _take_in(scheduler, output)
    return AdmitCost(
        make_ms=_ms(made - start),
        add_ms=_ms(added - made),
        schedule_ms=_ms(scheduled - added),
        update_ms=_ms(update),
        total_ms=_ms(scheduled - start + update),
        scheduled_tokens=output.total_num_scheduled_tokens,
    )


def _requests(
    name: str, prefixes: Sequence[list[int]], num_requests: int, prompt_len: int, tail: int
) -> list[EngineCoreRequest]:
    """As a front end makes them: from lists, each with sampling parameters of its own."""
    num_own = prompt_len - prompt_len // 2
    requests = []
    for number in range(num_requests):
        first = number * STRIDE + tail
        prompt = prefixes[number % NUM_PREFIXES] + [(first + position) % VOCAB_SIZE for position in range(num_own)]
        requests.append(
            EngineCoreRequest(
                request_id=f"{name}{number}",
                prompt_token_ids=np.array(prompt, dtype=np.int32),
                params=SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0),
                arrival_time=0.0,
            )
        )
    return requests


def _add(scheduler: Scheduler, requests: Sequence[EngineCoreRequest]) -> None:
    for request in requests:
        scheduler.add_request(request)


def _schedule_all(scheduler: Scheduler, num_requests: int) -> SchedulerOutput:
    output = scheduler.schedule()
    if output is None or len(output.new) != num_requests or not output.samples.all():
        started = 0 if output is None else int(output.samples.sum())
        raise CapacityError(
            f"one step took in {started} of {num_requests} requests and this benchmark needs all; raise "
            "scheduler.max_num_batched_tokens, scheduler.max_num_seqs or kv_cache.num_blocks, or lower "
            "bench.num_requests"
        )
    return output


def _take_in(scheduler: Scheduler, output: SchedulerOutput) -> float:
    """Seconds to update with a token for each row."""
    result = sampled(output)
    start = perf_counter()
    scheduler.update_from_output(output, result)
    return perf_counter() - start


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
