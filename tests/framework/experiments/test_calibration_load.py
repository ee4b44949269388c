"""The load of a calibration: it fits what the engine takes, and a closed loop gives places to those that wait."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.experiments.calibration_load import ClosedLoop, Lengths, Limits, Phase, edges, mixed_phase
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


@given(limits=LIMITS, most=st.integers(64, 100_000))
def test_edges_are_what_the_engine_takes_and_what_the_time_allows(limits: Limits, most: int) -> None:
    for phase in edges(limits, most):
        total = sum(map(sum, phase.requests))
        assert 1 <= phase.at_once <= limits.max_num_seqs
        assert all(min(lengths) >= 1 for lengths in phase.requests)
        assert all(sum(lengths) <= limits.capacity for lengths in phase.requests)
        fills_a_step = phase.at_once == 1 and phase.requests[0].prompt <= limits.max_num_batched_tokens
        assert fills_a_step or total <= min(most, limits.kv_tokens)


def test_edges_go_as_far_as_steps_batches_and_contexts_may() -> None:
    found = list(edges(Limits(48, 512, 2048, 10**6), 10**6))
    assert {1, 2, 256, 512} <= {phase.requests[0].prompt for phase in found if phase.at_once == 1}
    assert max(phase.at_once for phase in found) == 48
    assert {phase.at_once for phase in found if sum(phase.requests[0]) == 2048} == {1, 2, 4}


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
