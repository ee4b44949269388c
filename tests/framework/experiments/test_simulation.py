"""A simulation is the engine on virtual time: when requests join, what a step costs, and that nothing is lost."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planned_workloads import request, simulated
from tokenyard.errors import ConfigError, PluginError, ValidationError
from tokenyard.experiments.records import RequestStatus, RunRecord
from tokenyard.interfaces import OUTPUT, Segment, WorkloadRequest

POLICIES = ("fcfs", "priority", "sjf", "srpt", "vtc", "lpm", "mlfq", "edf", "least-computed", "hrrn", "plas")


def test_a_request_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    record = simulated([request(0.0, 5, 4)])
    assert record.totals.num_steps == 4
    assert record.totals.num_computed_tokens == 5 + 4 - 1
    assert record.requests.first_token.tolist() == [1.0]
    assert record.requests.finish.tolist() == [4.0]


def test_the_step_that_computes_the_last_prompt_token_emits_the_first_output_token() -> None:
    record = simulated(
        [request(0.0, 10, 2)], "scheduler.max_num_batched_tokens=4", "scheduler.max_num_seqs=4", "engine=sync"
    )
    assert record.requests.first_token.tolist() == [3.0]  # chunks of 4, 4 and 2


def test_an_arrival_joins_at_the_next_step_boundary_and_at_once_when_idle() -> None:
    record = simulated([request(0.25, 1, 2), request(0.5, 1, 1), request(10.75, 1, 1)])
    assert record.requests.first_scheduled.tolist() == [0.25, 1.25, 10.75]


def test_under_overlap_an_arrival_during_a_step_joins_the_second_step_after_it() -> None:
    record = simulated([request(0.0, 1, 6), request(1.5, 1, 1)], "engine=overlap")
    # During step 1 (from 1 to 2) step 2 is scheduled already; so it joins step 3, which runs from 3 to 4.
    assert record.requests.first_token.tolist() == [1.0, 4.0]
    assert record.requests.first_scheduled.tolist() == [0.0, 3.0]  # its step begins then, scheduled as it was at 2


@pytest.mark.parametrize("loop", ["sync", "overlap"])
@pytest.mark.parametrize("policy", ["fcfs", "sjf", "vtc"])
def test_requests_that_come_at_one_time_are_served_in_the_order_of_the_workload(policy: str, loop: str) -> None:
    work = [request(float(number), 1, 2) for number in range(12)]
    overrides = [f"scheduler={policy}", f"engine={loop}", "scheduler.max_num_seqs=1", "workload.arrivals=all_at_once"]
    record = simulated(work, *overrides)
    assert np.argsort(record.requests.first_token).tolist() == list(range(12))


def test_an_arrival_at_the_very_boundary_joins_the_step_that_begins_there() -> None:
    record = simulated([request(0.0, 1, 3), request(1.0, 1, 1)])
    assert record.requests.first_scheduled.tolist() == [0.0, 1.0]


def test_one_after_the_other_all_at_once_and_so_many_at_a_time() -> None:
    work = [request(float(number), 1, 2) for number in range(4)]
    assert simulated(work, "workload.arrivals=sequential").requests.arrival.tolist() == [0, 2, 4, 6]
    assert simulated(work, "workload.arrivals=all_at_once").requests.arrival.tolist() == [0, 0, 0, 0]
    closed = simulated(work, "workload.arrivals=closed_loop", "workload.concurrency=2")
    assert closed.requests.arrival.tolist() == [0, 0, 2, 2]


def test_times_are_scaled_and_the_workload_is_cut() -> None:
    record = simulated([request(2.0), request(4.0), request(6.0)], "workload.time_scale=0.5", "workload.limit=2")
    assert record.requests.arrival.tolist() == [1.0, 2.0]


def test_a_follow_up_comes_when_the_workload_says_and_counts_for_the_limit() -> None:
    def again(ended: WorkloadRequest, end: float) -> list[WorkloadRequest]:
        return [request(end + 3.0, 1, 1)]

    record = simulated([request(0.0, 1, 2)], "workload.limit=3", follow_ups=again)
    assert record.requests.arrival.tolist() == [0.0, 5.0, 9.0]


def test_a_follow_up_before_the_end_that_it_follows_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"follow-up of request 0 arrives at 0\.5"):
        simulated([request(0.0, 1, 2)], follow_ups=lambda ended, end: [request(0.5)])


def test_a_next_turn_finds_the_whole_conversation_in_the_cache() -> None:
    def turn(number: int, arrival: float) -> WorkloadRequest:
        content = [
            Segment(7, 32),
            *[part for k in range(number) for part in (Segment(OUTPUT, 17), Segment(100 + k, 15))],
        ]
        tokens = sum(segment.num_tokens for segment in content)
        return request(arrival, tokens, 17, session="s", content=content)

    turns = iter((1, 2))

    def follow_ups(ended: WorkloadRequest, end: float) -> list[WorkloadRequest]:
        return [turn(number, end + 1.0) for number in [next(turns, 0)] if number]

    record = simulated([turn(0, 0.0)], follow_ups=follow_ups, has_content=True)
    assert record.requests.prompt.tolist() == [32, 64, 96]
    # A turn of 32 prompt tokens leaves 48 computed (the last answer's K/V is not needed): blocks of 16.
    assert record.requests.cached.tolist() == [0, 48, 80]


def test_content_that_nobody_knows_is_like_no_other() -> None:
    content = [Segment(1, 64)]
    work = [request(0.0, 64, 1, content=content), request(5.0, 64, 1), request(9.0, 64, 1, content=content)]
    assert simulated(work, has_content=True).requests.cached.tolist() == [0, 0, 48]


def test_a_request_that_could_not_be_served_whole_is_one_clear_error() -> None:
    with pytest.raises(ValidationError, match=r"request 1 of the workload has 90 prompt and 20 output tokens.*100"):
        simulated([request(0.0, 10, 20), request(0.0, 90, 20)], "model.max_model_len=100")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["latency=none"], "nobody says how long a step takes"),
        (["executor=inproc"], "a simulation needs executor=simulated"),
        (["workload=none"], "there is nothing to run"),
        (["kv_cache.memory=1GiB"], "nobody knows what a block costs"),
    ],
)
def test_what_no_simulation_can_do_is_one_clear_error(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        simulated([request(0.0)], *overrides)


def test_a_deadline_aborts_and_is_told_apart() -> None:
    record = simulated([request(0.0, 1, 10, deadline=2.5), request(0.0, 1, 2)])
    assert record.requests.status.tolist() == [RequestStatus.ABORTED, RequestStatus.FINISHED]
    assert record.requests.output.tolist()[1] == 2
    assert 2 <= record.requests.output.tolist()[0] <= 3


def test_a_refused_request_is_told_apart() -> None:
    overrides = ["scheduler=scorpio", "latency=constant", "latency.per_step=1.0"]
    record = simulated([request(0.0, 1, 3)], *overrides)
    assert record.requests.status.tolist() == [RequestStatus.FINISHED]


def test_with_a_linear_step_the_largest_gap_without_preemption_is_that_of_a_full_budget() -> None:
    work = [request(0.0, 8, 400), *[request(1.0 + number * 0.01, 500, 4) for number in range(40)]]
    record = simulated(
        work,
        "latency=linear",
        "latency.per_step=0.005",
        "latency.per_token=0.0001",
        "scheduler.max_num_batched_tokens=256",
    )
    assert record.gaps.seconds.max() == pytest.approx(0.005 + 0.0001 * 256, rel=1e-9)


def test_the_gaps_are_those_between_the_tokens_of_each_request() -> None:
    record = simulated(
        [request(0.0, 1, 3), request(0.0, 3, 2)], "latency=linear", "latency.per_step=1", "latency.per_token=1"
    )
    # Steps of 4, 2 and 1 tokens end at 5, 8 and 10: gaps of 3 for both, and of 2.
    assert sorted(np.repeat(record.gaps.seconds, record.gaps.counts).tolist()) == [2.0, 3.0, 3.0]


def test_steps_tell_who_waits_and_blocks_are_weighed_by_the_time_that_they_are_held() -> None:
    record = simulated(
        [request(0.0, 20, 3), request(0.0, 1, 1)],
        "latency=linear",
        "latency.per_step=1",
        "latency.per_token=1",
        "scheduler.max_num_seqs=1",
        "kv_cache.num_blocks=8",
    )
    assert record.steps is not None
    assert record.steps.waiting.tolist() == [1, 1, 1, 0]
    assert record.steps.used_blocks.tolist() == [2, 2, 0, 0]  # once the step is done: what ended holds nothing
    assert record.totals.mean_kv_usage == pytest.approx((21 * 2 + 2 * 2) / (21 + 2 + 2 + 2) / 8)
    assert record.totals.max_kv_usage == 2 / 8


def check_conservation(record: RunRecord, num_requests: int) -> None:
    """What must hold of any run that ends by itself."""
    table, totals = record.requests, record.totals
    assert len(table) == num_requests
    assert (table.status == RequestStatus.FINISHED).all()
    needed = int((table.prompt.astype(np.int64) + table.output - 1 - table.cached).sum())
    assert totals.num_computed_tokens == needed + int(table.recomputed.sum())
    assert int(table.preemptions.sum()) == totals.num_preemptions
    assert (table.arrival <= table.first_scheduled).all()
    assert (table.first_scheduled < table.first_token).all()
    assert (table.first_token <= table.finish).all()
    assert int(record.gaps.counts.sum()) == int((table.output - 1).sum())
    spans = float((table.finish - table.first_token).sum())
    assert float((record.gaps.seconds * record.gaps.counts).sum()) == pytest.approx(spans, rel=1e-9, abs=1e-9)
    assert record.steps is not None
    assert (record.steps.start[1:] >= record.steps.end[:-1] - 1e-9).all()
    assert int((record.steps.prefill_tokens + record.steps.decode_tokens).sum()) == totals.num_computed_tokens


lengths = st.tuples(st.integers(1, 60), st.integers(1, 40))


@settings(max_examples=40, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    work=st.lists(st.tuples(st.floats(0, 30), lengths, st.integers(0, 3)), min_size=1, max_size=14),
    policy=st.sampled_from(POLICIES),
    mode=st.sampled_from(["recompute", "pause"]),
    loop=st.sampled_from(["sync", "overlap"]),
    num_blocks=st.sampled_from([8, 12, 100]),
)
def test_nothing_is_lost_and_every_computed_token_is_accounted_for(
    work: list[tuple[float, tuple[int, int], int]], policy: str, mode: str, loop: str, num_blocks: int
) -> None:
    arrivals = sorted(moment for moment, _, _ in work)
    requests = [
        request(moment, *length, client=f"c{who}", session=f"s{who}", priority=who)
        for moment, (_, length, who) in zip(arrivals, work, strict=True)
    ]
    record = simulated(
        requests,
        f"scheduler={policy}",
        f"scheduler.preempt_mode={mode}",
        f"engine={loop}",
        f"kv_cache.num_blocks={num_blocks}",
        "scheduler.max_num_seqs=4",
        "scheduler.max_num_batched_tokens=32",
        "latency=linear",
        "latency.per_step=0.3",
        "latency.per_token=0.01",
    )
    check_conservation(record, len(requests))
    if num_blocks == 100 and policy == "fcfs":
        assert record.totals.num_preemptions == 0


def feasible_deadlines(arrivals: list[int], outputs: list[int], draw: Random) -> list[int]:
    """When each is done by a schedule that gives every step to anybody who is there."""
    left, ends, now = list(outputs), [0] * len(outputs), 0
    while any(left):
        if ready := [number for number, moment in enumerate(arrivals) if moment <= now and left[number]]:
            number = draw.choice(ready)
            left[number] -= 1
            ends[number] = now + 1
        now += 1
    return ends


lengths_and_gaps = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=12)


@settings(max_examples=15)
@given(work=lengths_and_gaps, draw=st.randoms(use_true_random=False))
def test_preemptive_edf_misses_no_deadline_of_a_feasible_schedule(work: list[tuple[int, int]], draw: Random) -> None:
    outputs, arrivals = [output for output, _ in work], np.cumsum([gap for _, gap in work]).tolist()
    ends = feasible_deadlines(arrivals, outputs, draw)
    record = simulated(
        [
            request(float(arrival), 1, output, deadline=end - arrival + 1e-6)
            for arrival, output, end in zip(arrivals, outputs, ends, strict=True)
        ],
        "scheduler=edf",
        "scheduler.policy.preempt=true",
        "scheduler.max_num_seqs=1",
        "scheduler.preempt_mode=pause",
    )
    assert (record.requests.status == RequestStatus.FINISHED).all()
    assert (record.requests.finish <= record.requests.deadline).all()
