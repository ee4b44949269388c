"""The load of a calibration: it fits what the engine takes, and a closed loop gives places to those that wait."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.experiments.calibration_load import ClosedLoop, Lengths, Limits, Phase, mixed_phase, single_prompts
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams

LIMITS = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 256),
    max_num_batched_tokens=st.integers(1, 4096),
    capacity=st.integers(2, 8192),
    kv_tokens=st.integers(16, 100_000),
)


@given(limits=LIMITS, most=st.integers(1, 100_000), seed=st.integers(0, 1000))
def test_no_request_of_a_mixed_phase_is_more_than_the_engine_takes(limits: Limits, most: int, seed: int) -> None:
    phase = mixed_phase(limits, most, np.random.default_rng(seed))
    assert 1 <= phase.at_once <= limits.max_num_seqs
    for lengths in phase.requests:
        assert lengths.prompt >= 1
        assert lengths.output >= 1
        assert sum(lengths) <= limits.capacity
    if phase.at_once > 1:
        assert sum(map(sum, phase.requests)) <= most


@given(limits=LIMITS)
def test_single_prompts_are_whole_steps(limits: Limits) -> None:
    for phase in single_prompts(limits):
        assert phase.at_once == 1
        assert all(lengths.prompt <= limits.max_num_batched_tokens for lengths in phase.requests)
        assert all(sum(lengths) <= limits.capacity for lengths in phase.requests)


def test_small_and_large_loops_are_as_frequent() -> None:
    rng, limits = np.random.default_rng(0), Limits(64, 2048, 8192, 10**6)
    sizes = [mixed_phase(limits, 10**6, rng).at_once for _ in range(600)]
    assert 60 < sum(size == 1 for size in sizes) < 180
    assert 60 < sum(size >= 32 for size in sizes) < 180


def request(lengths: Lengths) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=str(lengths.prompt),
        prompt_token_ids=np.zeros(1, dtype=np.int32),
        params=SamplingParams(max_tokens=1),
        arrival_time=0.0,
    )


def test_a_closed_loop_keeps_its_order_and_never_has_more_than_its_places() -> None:
    loop = ClosedLoop(Phase(2, [Lengths(number, 1) for number in range(5)]), request)
    assert [one.request_id for one in loop.due(0.0)] == ["0", "1"]
    assert not loop.due(0.0)
    loop.ended(1)
    assert [one.request_id for one in loop.due(0.0)] == ["2"]
    loop.ended(2)
    assert [one.request_id for one in loop.due(0.0)] == ["3", "4"]
    assert loop.is_exhausted()
    assert loop.next_time() is None
