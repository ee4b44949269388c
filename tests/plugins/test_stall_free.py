"""stall-free: no prompt makes those who are being answered wait."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from tokenyard.errors import ConfigError
from tokenyard.scheduler_output import SchedulerOutput
from tokenyard.testing import EngineHarness, PolicyContract

PER_STEP, PER_TOKEN, PER_CONTEXT_TOKEN = 0.010, 0.001, 0.00001
LINEAR = (
    "latency=linear",
    f"latency.per_step={PER_STEP}",
    f"latency.per_token={PER_TOKEN}",
    f"latency.per_context_token={PER_CONTEXT_TOKEN}",
)
BLOCK_SIZE = 16


class TestStallFree(PolicyContract):
    overrides = ("scheduler=stall-free", "scheduler.policy.target_step_seconds=0.02", *LINEAR)
    max_examples = 3


class TestStallFreeOnePromptAtATime(PolicyContract):
    overrides = ("scheduler=stall-free", "scheduler.policy.max_prefills=1", "scheduler.policy.align=2", *LINEAR)
    max_examples = 3


def seconds_of(output: SchedulerOutput) -> float:
    """What the latency model says of a step: here it is the truth. A row of one token that samples is a decode."""
    is_decode = (output.num_scheduled_tokens == 1) & output.samples
    context = int(output.num_computed_tokens[is_decode].sum())
    return PER_STEP + PER_TOKEN * int(output.num_scheduled_tokens.sum()) + PER_CONTEXT_TOKEN * context


def timed(*overrides: str, seconds: Callable[[SchedulerOutput], float] = seconds_of) -> EngineHarness:
    sizes = ("scheduler.max_num_batched_tokens=2048", f"kv_cache.block_size={BLOCK_SIZE}")
    return EngineHarness([*sizes, *LINEAR, *overrides], step_seconds=seconds)


def largest_gap(*overrides: str) -> float:
    """Between two tokens of the same request, of eight that are being answered while long prompts come."""
    times: dict[str, list[float]] = {}
    with timed(*overrides) as engine:
        for number in range(8):
            engine.add(range(20 * number, 20 * number + 20), f"talks {number}", max_tokens=120, ignore_eos=True)
        for step in range(10_000):
            if step % 15 == 5 and step < 60:
                start = 1000 * step
                engine.add(range(start, start + 1500), f"reads {step}", max_tokens=20, ignore_eos=True)
            if not engine.has_requests:
                break
            for request_id in engine.step().request_ids:
                times.setdefault(request_id, []).append(engine.clock.now())
    return float(np.max([later - earlier for each in times.values() for earlier, later in pairwise(each)]))


@pytest.mark.parametrize("engine", ["sync", "overlap"])
@pytest.mark.parametrize("target", [0.03, 0.1])
def test_the_largest_gap_between_tokens_stays_below_the_target(engine: str, target: float) -> None:
    gap = largest_gap("scheduler=stall-free", f"scheduler.policy.target_step_seconds={target}", f"engine={engine}")
    assert 0.5 * target < gap <= target + 1e-9


def test_without_it_a_long_prompt_makes_everybody_wait() -> None:
    assert largest_gap("scheduler=fcfs") > 1.5  # 1500 tokens in a step


def chunks_of(engine: EngineHarness) -> list[int]:
    """Of the one prompt that is there."""
    found = []
    while engine.has_requests:
        engine.step()
        found += [output.total_num_scheduled_tokens for output in engine.last_outputs]
    return [count for count in found if count > 1]


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_chunks_end_at_blocks_and_the_last_one_at_the_prompt(engine: str) -> None:
    # 60 ms have room for 50 tokens, and 48 are three blocks.
    for align, chunks in ((1, [48, 48, 34]), (2, [32, 32, 32, 34]), (0, [50, 50, 30])):
        target = "scheduler.policy.target_step_seconds=0.0601"
        options = target, f"scheduler.policy.align={align}", f"engine={engine}"
        with timed("scheduler=stall-free", *options) as harness:
            harness.add(range(130), "prompt", max_tokens=1)
            assert chunks_of(harness) == chunks


@pytest.mark.parametrize("engine", ["sync", "overlap"])
@pytest.mark.parametrize(("num_more", "chunks"), [(36, [36]), (66, [48, 18])])
def test_a_prompt_that_hits_the_cache_starts_behind_the_hit(engine: str, num_more: int, chunks: list[int]) -> None:
    target = "scheduler.policy.target_step_seconds=0.0601"
    with timed("scheduler=stall-free", target, f"engine={engine}") as harness:
        harness.add(range(65), "first", max_tokens=1)
        harness.run()
        harness.add([*range(64), *range(500, 500 + num_more)], "second", max_tokens=1)
        assert chunks_of(harness) == chunks


def test_a_time_that_has_no_room_for_a_block_still_gets_a_prompt_done() -> None:
    with timed("scheduler=stall-free", "scheduler.policy.target_step_seconds=0.0151") as engine:
        engine.add(range(40), "prompt", max_tokens=1)
        assert chunks_of(engine) == [5] * 8


def test_a_time_that_is_too_short_for_any_token_stops_nobody() -> None:
    with timed("scheduler=stall-free", "scheduler.policy.target_step_seconds=0.001") as engine:
        engine.add(range(40), "prompt", max_tokens=5, ignore_eos=True)
        engine.run(limit=200)
        assert len(engine.request("prompt").output_token_ids) == 5


def test_max_prefills_bounds_how_many_prompts_are_computed_at_once() -> None:
    for most, expected in (("1", 1), ("2", 2), ("null", 4)):
        with timed("scheduler=stall-free", f"scheduler.policy.max_prefills={most}") as engine:
            for number in range(6):
                engine.add(range(100 * number, 100 * number + 60), f"{number}", max_tokens=6, ignore_eos=True)
            seen = 0
            while engine.has_requests:
                engine.step()
                seen = max(seen, sum(count > 1 for count in engine.scheduled.values()))
            assert seen == expected


def test_without_a_latency_model_it_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"stall-free .* set latency=linear or latency=constant"):
        EngineHarness(["scheduler=stall-free"])
    with pytest.raises(ConfigError, match=r"^scheduler\.shadow=stall-free: .* set latency=linear"):
        EngineHarness(["scheduler.shadow=stall-free"])


@pytest.mark.parametrize("option", ["target_step_seconds=0", "target_step_seconds=nan", "align=-1", "max_prefills=0"])
def test_an_option_that_cannot_be_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        timed("scheduler=stall-free", f"scheduler.policy.{option}")
