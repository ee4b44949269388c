"""ScriptedExecutor: steps that no worker could run rightly are refused, each by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tokenyard.clock import VirtualClock
from tokenyard.errors import ConfigError
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import BlockTableUpdate, HostTransfer, RequestStart, SchedulerOutput, Slot
from tokenyard.testing import ContractViolation, ScriptedExecutor
from tokenyard.testing.worker_side import WorkerLimits

Row = tuple[int, int, int, int]  # slot, tokens computed before, tokens in the step, generation


def executor(*, windows: Sequence[int | None] = (None,)) -> ScriptedExecutor:
    limits = WorkerLimits(
        max_num_seqs=2,
        max_num_batched_tokens=10,
        block_size=4,
        num_blocks=8,
        group_windows=tuple(windows),
        num_host_blocks=2,
    )
    return ScriptedExecutor(limits, vocab_size=100, clock=VirtualClock())


def ints(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def start(
    name: str, slot: int, tokens: Sequence[int], blocks: Sequence[Sequence[int]], *, hit: int = 0, generation: int = 1
) -> RequestStart:
    return RequestStart(
        request_id=name,
        slot=Slot(slot, generation),
        token_ids=ints(tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=hit,
        block_ids=tuple(ints(group) for group in blocks),
        params=SamplingParams(),
    )


def step(number: int, rows: Sequence[Row], samples: Sequence[bool] | None = None, **more: object) -> SchedulerOutput:
    return SchedulerOutput(
        step=number,
        slots=np.array([row[0] for row in rows], dtype=np.int64),
        num_computed_tokens=ints([row[1] for row in rows]),
        num_scheduled_tokens=ints([row[2] for row in rows]),
        generations=ints([row[3] for row in rows]),
        samples=np.array([True] * len(rows) if samples is None else samples, dtype=np.bool_),
        **more,  # type: ignore[arg-type]
    )


def started(executor: ScriptedExecutor) -> ScriptedExecutor:
    """One request of five tokens in slot 0 with blocks 1 and 2, whose first step has landed."""
    run(executor, step(0, [(0, 0, 5, 1)], new=[start("a", 0, range(5), [[1, 2]])]))
    return executor


def run(executor: ScriptedExecutor, output: SchedulerOutput) -> list[int]:
    executor.execute_model(output)
    return [int(token) for token in executor.sample_tokens().result().token_ids]


def refused(executor: ScriptedExecutor, output: SchedulerOutput) -> str:
    with pytest.raises(ContractViolation) as caught:
        run(executor, output)
    assert executor.violation is caught.value
    return caught.value.rule


def test_a_right_step_gives_a_token_for_each_row_that_samples() -> None:
    made = executor()
    output = step(
        0,
        [(0, 0, 5, 1), (1, 0, 3, 1)],
        [True, False],
        new=[start("a", 0, range(5), [[1, 2]]), start("b", 1, range(6), [[3, 4]])],
    )
    made.script = {"a": [7]}
    assert run(made, output) == [7]
    assert run(made, step(1, [(0, 5, 1, 1), (1, 3, 3, 1)])) != []


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        (step(1, []), "step.never_empty"),
        (step(0, [(0, 5, 1, 1)]), "step.order"),
        (step(1, [(0, 5, 1, 1), (0, 5, 1, 1)]), "step.rows_unique"),
        (step(1, [(1, 0, 1, 1)]), "step.only_live"),
        (step(1, [(0, 5, 1, 2)]), "step.only_live"),
        (step(1, [(0, 5, 0, 1)]), "step.counts"),
        (step(1, [(0, 5, 11, 1)]), "step.budget"),
        (step(1, [(0, 6, 1, 1)]), "step.positions_continue"),
        (step(1, [(0, 3, 3, 1)]), "step.positions_continue"),
        (step(1, [(0, 5, 2, 1)]), "step.tokens_known"),
        (step(1, [(0, 5, 1, 1)], [False]), "step.samples"),
        (step(1, [(0, 5, 1, 1)], finished=[Slot(1, 1)]), "slot.finished_once"),
        (step(1, [(0, 5, 1, 1)], finished=[Slot(0, 2)]), "slot.finished_once"),
        (step(1, [(0, 5, 1, 1)], new=[start("b", 0, [1], [[3]], generation=2)]), "slot.taken"),
        (step(1, [(1, 0, 1, 1)], new=[start("a", 1, [1], [[3]])]), "request.new_once"),
        (step(1, [(1, 0, 1, 1)], resumed=[start("b", 1, [1], [[3]])]), "request.new_once"),
        (step(1, [(1, 4, 1, 1)], new=[start("b", 1, range(4), [[1]], hit=4)]), "kv.hit_below_length"),
        (step(1, [(1, 0, 5, 1)], new=[start("b", 1, range(5), [[3]])]), "table.covers_step"),
        (step(1, [(1, 0, 1, 1)], new=[start("b", 1, [1], [[3], [4]])]), "table.groups"),
        (step(1, [(1, 0, 1, 1)], new=[start("b", 1, [1], [[0]])]), "kv.null_block"),
        (step(1, [(1, 0, 1, 1)], new=[start("b", 1, [1], [[9]])]), "kv.block_id"),
        (step(1, [(0, 5, 1, 1)], block_table_updates=[BlockTableUpdate(Slot(0, 1), 0, 1, ints([3]))]), "table.append"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused(output: SchedulerOutput, rule: str) -> None:
    assert refused(started(executor()), output) == rule


def test_more_rows_than_may_run_are_refused() -> None:
    starts = [start(name, slot, [1], [[slot + 1]]) for slot, name in enumerate("abc")]
    output = step(0, [(slot, 0, 1, 1) for slot in range(3)], new=starts)
    assert refused(executor(), output) == "step.max_num_seqs"


def test_a_slot_comes_back_with_a_higher_generation_only() -> None:
    made = started(executor())
    output = step(1, [(0, 0, 1, 1)], finished=[Slot(0, 1)], new=[start("b", 0, [1], [[3]])])
    assert refused(made, output) == "slot.generation"


def test_a_hit_is_only_what_holds_the_same_tokens() -> None:
    right = step(1, [(1, 4, 2, 1)], new=[start("b", 1, [0, 1, 2, 3, 9, 9], [[1, 3]], hit=4)])
    other_tokens = step(1, [(1, 4, 2, 1)], new=[start("b", 1, [0, 1, 2, 7, 9, 9], [[1, 3]], hit=4)])
    nothing_there = step(1, [(1, 4, 2, 1)], new=[start("b", 1, [0, 1, 2, 3, 9, 9], [[4, 3]], hit=4)])
    run(started(executor()), right)
    assert refused(started(executor()), other_tokens) == "kv.content"
    assert refused(started(executor()), nothing_there) == "kv.content"


def test_a_block_that_two_requests_write_is_found_when_it_is_read() -> None:
    made = started(executor())
    run(made, step(1, [(1, 0, 3, 1)], new=[start("b", 1, [7, 8, 9], [[2]])]))
    assert refused(made, step(2, [(0, 5, 1, 1)])) == "kv.content"


def test_blocks_and_slots_of_a_step_in_flight_are_given_to_nobody() -> None:
    slot, block = started(executor()), started(executor())
    for made in (slot, block):
        made.execute_model(step(1, [(0, 5, 1, 1)]))
    with pytest.raises(ContractViolation, match=r"slot\.reused_in_flight.*still names it for 'a'"):
        slot.execute_model(
            step(2, [(0, 0, 1, 2)], finished=[Slot(0, 1)], new=[start("b", 0, [1], [[3]], generation=2)])
        )
    with pytest.raises(ContractViolation, match=r"block\.reused_in_flight.*\[2\]"):
        block.execute_model(step(2, [(1, 0, 1, 1)], finished=[Slot(0, 1)], new=[start("b", 1, [1], [[2]])]))


def test_behind_a_window_the_null_block_is_legal_and_before_it_not() -> None:
    made = executor(windows=(4,))
    run(made, step(0, [(0, 0, 9, 1)], new=[start("a", 0, range(9), [[1, 2, 3]])]))
    far = step(1, [(1, 8, 1, 1)], new=[start("b", 1, range(9), [[0, 2, 4]], hit=8)])
    near = step(
        2, [(1, 8, 1, 2)], finished=[Slot(1, 1)], new=[start("c", 1, range(9), [[0, 0, 4]], hit=8, generation=2)]
    )
    run(made, far)
    assert refused(made, near) == "kv.null_block"


def test_results_come_in_order_and_once_whoever_asks_first() -> None:
    made = executor()
    made.execute_model(step(0, [(0, 0, 5, 1)], new=[start("a", 0, range(5), [[1, 2]])]))
    first = made.sample_tokens()
    made.execute_model(step(1, [(0, 5, 1, 1)]))
    second = made.sample_tokens()
    made.script = {"a": [3]}
    assert second.result().step == 1
    assert [first.result().step, first.result().token_ids.tolist(), second.result().step] == [0, [3], 1]


def test_sampling_needs_a_step_and_nothing_runs_after_shutdown() -> None:
    made = executor()
    with pytest.raises(ContractViolation, match=r"executor\.one_sample"):
        made.sample_tokens()
    made.shutdown()
    with pytest.raises(ContractViolation, match=r"executor\.after_shutdown"):
        made.execute_model(step(0, [(0, 0, 1, 1)], new=[start("a", 0, [1], [[1]])]))
    with pytest.raises(ConfigError, match="unknown function 'f'"):
        made.collective_rpc("f")


def copied(blocks: Sequence[int], host_blocks: Sequence[int], *, to_host: bool, group: int = 0) -> HostTransfer:
    return HostTransfer(ints(blocks), ints(host_blocks), to_host, group)


def swapped_out() -> ScriptedExecutor:
    """The request of `started` left, and its first block was copied to host block 1; all blocks were written over."""
    made = started(executor())
    known = start("b", 1, range(90, 98), [[1, 2]])
    out = copied([1], [1], to_host=True)
    run(made, step(1, [(1, 0, 8, 1)], new=[known], finished=[Slot(0, 1)], host_transfers=[out]))
    return made


def test_what_was_copied_to_host_memory_and_back_is_what_was_there_before_the_step_wrote() -> None:
    again = start("a", 0, range(5), [[5, 6]], hit=4, generation=2)
    back = copied([5], [1], to_host=False)
    run(swapped_out(), step(2, [(0, 4, 1, 2)], resumed=[again], host_transfers=[back]))


@pytest.mark.parametrize(
    ("transfer", "rule"),
    [
        (copied([5], [0], to_host=False), "kv.content"),
        (copied([6], [1], to_host=False), "kv.content"),
        (copied([5], [2], to_host=False), "transfer.blocks"),
        (copied([0], [1], to_host=False), "transfer.blocks"),
        (copied([9], [1], to_host=True), "transfer.blocks"),
        (copied([5, 5], [0, 1], to_host=False), "transfer.blocks"),
        (copied([5], [0, 1], to_host=False), "transfer.blocks"),
        (copied([5], [1], to_host=False, group=1), "transfer.blocks"),
    ],
)
def test_a_wrong_copy_from_host_memory_is_noticed(transfer: HostTransfer, rule: str) -> None:
    again = start("a", 0, range(5), [[5, 6]], hit=4, generation=2)
    assert refused(swapped_out(), step(2, [(0, 4, 1, 2)], resumed=[again], host_transfers=[transfer])) == rule


def test_nothing_is_copied_into_blocks_that_a_step_in_flight_uses_for_who_left() -> None:
    made = started(executor())
    made.execute_model(step(1, [(0, 5, 1, 1)]))
    made.sample_tokens()
    output = step(
        2,
        [(1, 0, 1, 1)],
        new=[start("b", 1, [1], [[3]])],
        finished=[Slot(0, 1)],
        host_transfers=[copied([2], [0], to_host=False)],
    )
    assert refused(made, output) == "block.reused_in_flight"
