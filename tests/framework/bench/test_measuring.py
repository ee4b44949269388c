"""The steady loop: what it gives a scheduler, and what it does when the batch is not steady."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tokenyard.bench.decode import blocks_needed, decode_requests, measure_decode
from tokenyard.bench.headless import VOCAB_SIZE, headless_scheduler, sampled, sampled_ahead
from tokenyard.errors import UserError
from tokenyard.interfaces import Scheduler
from tokenyard.launch.compose import load_engine_config
from tokenyard.request import FinishReason
from tokenyard.runner_output import ModelRunnerOutput
from tokenyard.scheduler_output import SchedulerOutput

CONFIG = ["scheduler.max_num_seqs=4", "model.max_model_len=512", "kv_cache.num_blocks=100"]


@pytest.fixture
def scheduler() -> Scheduler:
    return headless_scheduler(*load_engine_config(CONFIG))


def check_nothing_is_held(scheduler: Scheduler, num_requests: int) -> None:
    """End everything: then every block is free again."""
    scheduler.finish_requests([f"r{number}" for number in range(num_requests)], FinishReason.ABORT)
    assert scheduler.schedule() is None
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)


def test_prompts_are_the_agreed_ones() -> None:
    requests = decode_requests(20, 512)
    for number, request in enumerate(requests):
        assert len(request.prompt_token_ids) == 512 + number % 16
        expected = [(number * 7919 + position) % VOCAB_SIZE for position in range(512 + number % 16)]
        assert request.prompt_token_ids.tolist() == expected


def test_the_blocks_that_the_steps_need_are_counted() -> None:
    assert blocks_needed(1, 15, 1, 16) == 2  # 15 + 1 + the token whose place the next step takes
    assert blocks_needed(3, 512, 320, 16) == sum(-(-(512 + i + 321) // 16) for i in range(3))


def test_each_timed_step_decodes_one_token_of_every_request(scheduler: Scheduler) -> None:
    seen: list[SchedulerOutput] = []
    schedule = scheduler.schedule

    def recording() -> SchedulerOutput | None:
        output = schedule()
        if output is not None:
            seen.append(output)
        return output

    scheduler.schedule = recording  # type: ignore[method-assign]
    cost = measure_decode(scheduler, decode_requests(4, 30), 12)
    assert all(output.num_scheduled_tokens.tolist() == [1, 1, 1, 1] for output in seen[-12:])
    assert not any(output.new or output.resumed or output.finished for output in seen[-12:])
    assert (cost.num_running, cost.num_waiting) == (4, 0)
    check_nothing_is_held(scheduler, 4)


def test_a_scheduler_may_number_its_steps_as_it_likes(scheduler: Scheduler) -> None:
    steps: list[tuple[int, int]] = []
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def tens() -> SchedulerOutput | None:
        output = schedule()
        return None if output is None else dataclasses.replace(output, step=10 * output.step)

    def recording(output: SchedulerOutput, result: ModelRunnerOutput) -> object:
        steps.append((output.step, result.step))
        return update(dataclasses.replace(output, step=output.step // 10), result)

    scheduler.schedule = tens  # type: ignore[method-assign]
    scheduler.update_from_output = recording  # type: ignore[method-assign,assignment]
    measure_decode(scheduler, decode_requests(2, 5), 4)
    assert all(output == result for output, result in steps)
    check_nothing_is_held(scheduler, 2)


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_scheduler_that_stops_is_no_steady_batch(scheduler: Scheduler, num_good: int) -> None:
    schedule, left = scheduler.schedule, iter(range(num_good))
    scheduler.schedule = lambda: schedule() if next(left, None) is not None else None  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"schedules nothing|did not stay as it was"):
        measure_decode(scheduler, decode_requests(2, 5), 4)


def test_results_made_ahead_share_their_arrays_and_count_the_steps_on(scheduler: Scheduler) -> None:
    for request in decode_requests(2, 5):
        scheduler.add_request(request)
    output = scheduler.schedule()
    assert output is not None
    result = sampled(output)
    assert result.num_sampled.tolist() == [1, 1]
    ahead = sampled_ahead(output, 3)
    assert [later.step for later in ahead] == [output.step + 1, output.step + 2, output.step + 3]
    assert all(np.shares_memory(later.token_ids, ahead[0].token_ids) for later in ahead)
    scheduler.update_from_output(output, result)
    check_nothing_is_held(scheduler, 2)
