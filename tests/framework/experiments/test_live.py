"""Workloads on a real engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from planted_workloads import PlantedWorkload, planted
from tokenyard.errors import ConfigError, ValidationError
from tokenyard.experiments.config_file import write_config
from tokenyard.experiments.live_prompts import text_vocabulary
from tokenyard.experiments.records import RequestStatus, RunRecord
from tokenyard.experiments.run import run_workload
from tokenyard.experiments.run_clock import RunClock
from tokenyard.experiments.run_folder import read_run
from tokenyard.experiments.run_job import run_in
from tokenyard.interfaces import Workload, WorkloadRequest
from tokenyard.interfaces.workload import OUTPUT, Segment
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.overrides import quote_override

SMALL = (
    "model.dtype=float32",
    "model.max_model_len=128",
    "kv_cache.num_blocks=64",
    "scheduler.max_num_seqs=4",
    "attention=torch_native",
)


@pytest.fixture
def overrides(tiny_llama_dir: Path) -> list[str]:
    return [quote_override("model.name", str(tiny_llama_dir)), *SMALL]


def run(workload: Workload, overrides: Sequence[str], *, keeps_steps: bool = False) -> RunRecord:
    return run_workload(*planted(workload, overrides), keeps_steps=keeps_steps)


def some(count: int, *, gap: float = 0.002) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(
            arrival=gap * number,
            num_prompt_tokens=5 + 3 * number,
            num_output_tokens=1 + number,
            client=f"c{number % 2}",
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_every_request_gets_what_the_workload_says_and_times_are_ordered(overrides: list[str], loop: str) -> None:
    record = run(PlantedWorkload(some(9)), [*overrides, f"engine={loop}"], keeps_steps=True)
    table = record.requests
    assert table.status.tolist() == [RequestStatus.FINISHED] * 9
    assert table.prompt.tolist() == [5 + 3 * number for number in range(9)]
    assert table.output.tolist() == [1 + number for number in range(9)]
    assert table.arrival == pytest.approx([0.002 * number for number in range(9)])
    assert [table.clients[client] for client in table.client] == [f"c{number % 2}" for number in range(9)]
    assert (table.arrival <= table.first_scheduled).all()
    assert (table.first_scheduled < table.first_token).all()
    assert (table.first_token <= table.finish).all()
    assert record.gaps.counts.sum() == (table.output - 1).sum()
    assert record.steps is not None
    assert (record.steps.prefill_tokens + record.steps.decode_tokens).sum() >= (table.prompt + table.output - 1).sum()


def test_the_warm_up_is_no_part_of_the_record(overrides: list[str]) -> None:
    record = run(PlantedWorkload(some(3)), overrides, keeps_steps=True)
    expected = int((record.requests.prompt + record.requests.output - 1).sum())
    assert record.totals.num_computed_tokens == expected
    assert record.totals.num_preemptions == 0
    assert record.steps is not None
    assert record.steps.start.min() >= 0
    assert "tokenyard-warm-up" not in record.requests.clients


def test_the_record_says_what_the_engine_turned_out_to_be(overrides: list[str]) -> None:
    facts = run(PlantedWorkload(some(1)), overrides).facts
    assert (facts["device"], facts["dtype"], facts["num_blocks"], facts["max_model_len"]) == ("cpu", "float32", 64, 128)


def test_the_results_of_a_run_say_what_it_ran_on(overrides: list[str], tmp_path: Path) -> None:
    workload = [
        "workload=synthetic",
        "workload.limit=3",
        "workload.rate=1000",
        "workload.prompt=9",
        "workload.output=4",
    ]
    config, _ = load_engine_config([*overrides, *workload])
    write_config(tmp_path, config, [])
    run_in(tmp_path)
    stored = read_run(tmp_path)
    assert stored.record.requests.output.tolist() == [4, 4, 4]
    ran_on = stored.facts["ran_on"]
    assert isinstance(ran_on, dict)
    assert (ran_on["device"], ran_on["num_blocks"]) == ("cpu", 64)


def test_a_closed_loop_sends_the_next_one_when_one_has_ended(overrides: list[str]) -> None:
    record = run(PlantedWorkload(some(6)), [*overrides, "workload.arrivals=closed_loop", "workload.concurrency=2"])
    table = record.requests
    assert table.arrival[:2].tolist() == [0.0, 0.0]
    assert set(table.arrival[2:]) <= set(table.finish)


def test_a_request_past_its_deadline_is_aborted_and_the_others_are_served(overrides: list[str]) -> None:
    late = WorkloadRequest(arrival=0.0, num_prompt_tokens=20, num_output_tokens=100, deadline=0.001)
    record = run(PlantedWorkload([late, *some(2)]), overrides)
    assert record.requests.status.tolist() == [RequestStatus.ABORTED, *[RequestStatus.FINISHED] * 2]
    assert record.requests.deadline[0] == pytest.approx(0.001)


def test_the_next_turn_comes_after_the_answer_and_finds_it_in_the_prefix_cache(overrides: list[str]) -> None:
    def next_turn(request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        content = [*(request.content or ()), Segment(OUTPUT, request.num_output_tokens), Segment(3, 4)]
        if len(content) > 5:
            return ()
        return [
            WorkloadRequest(
                arrival=end + 0.001,
                num_prompt_tokens=sum(segment.num_tokens for segment in content),
                num_output_tokens=17,
                session=request.session,
                content=content,
            )
        ]

    first = WorkloadRequest(
        arrival=0.0, num_prompt_tokens=20, num_output_tokens=17, session="s", content=[Segment(1, 20)]
    )
    table = run(PlantedWorkload([first], next_turn, has_content=True), overrides).requests
    assert table.prompt.tolist() == [20, 41, 62]
    # Every token but the last one of an answer was computed, and lies in whole blocks of 16.
    assert table.cached.tolist() == [0, 32, 48]
    assert (table.arrival[1:] >= table.finish[:-1]).all()


def test_prompts_without_content_meet_no_prefix_cache(overrides: list[str]) -> None:
    same = [WorkloadRequest(arrival=0.0, num_prompt_tokens=64, num_output_tokens=2) for _ in range(4)]
    assert run(PlantedWorkload(same), overrides).requests.cached.tolist() == [0, 0, 0, 0]


def test_a_request_that_cannot_be_served_whole_is_one_error_and_leaves_no_engine(overrides: list[str]) -> None:
    long = WorkloadRequest(arrival=0.0, num_prompt_tokens=120, num_output_tokens=9)
    with pytest.raises(ValidationError, match=r"request 0 of the workload has 120 prompt and 9 output tokens"):
        run(PlantedWorkload([long]), overrides)
    assert len(run(PlantedWorkload(some(1)), overrides).requests) == 1


def test_an_engine_in_a_process_of_its_own_is_refused_with_what_to_do(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"engine.process=own: .*experiment.target"):
        run(PlantedWorkload(some(1)), [*overrides, "engine.process=own"])


def test_prompts_have_neither_control_tokens_nor_ids_beyond_the_tokenizer(overrides: list[str]) -> None:
    config, catalogue = load_engine_config(overrides)
    engine = build_engine(config, catalogue)
    try:
        found = set(text_vocabulary(engine).tolist())
        assert found
        assert not found & {0, 1, 2}  # the tiny tokenizer's control tokens
        assert max(found) < engine.report.vocab_size
    finally:
        engine.core.shutdown()


def test_a_run_clock_jumps_forward_to_zero_once() -> None:
    clock = RunClock()
    before = clock.now()
    clock.begin()
    assert before < -1e5
    assert 0 <= clock.now() < 1e5


def test_a_simulated_executor_simulates(overrides: list[str]) -> None:
    simulated = ["executor=simulated", "latency=constant", "latency.per_step=0.5"]
    record = run(PlantedWorkload(some(2, gap=0.0)), simulated)
    assert record.requests.finish.tolist() == [0.5, 1.0]
    assert record.requests.first_token.tolist() == [0.5, 0.5]
