"""InputBatch: what a worker packs from the deltas that it is sent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tokenyard.errors import LogitsProcessorError
from tokenyard.interfaces import RowLogitsProcessor
from tokenyard.request import PoolingParams
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import BlockTableUpdate, RequestStart, SchedulerOutput, Slot
from tokenyard.worker.input_batch import InputBatch

GREEDY = SamplingParams(temperature=0)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def start(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> RequestStart:
    return RequestStart(
        request_id=f"r{slot}",
        slot=Slot(slot, 1),
        token_ids=ints(*tokens),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        block_ids=(ints(*blocks),),
        params=GREEDY,
    )


def output(rows: list[tuple[int, int, int, bool]], **parts: object) -> SchedulerOutput:
    """Rows of (slot, computed, scheduled, samples)."""
    slots, computed, scheduled, samples = zip(*rows, strict=True)
    return SchedulerOutput(
        step=0,
        slots=ints(*slots),
        generations=ints(*[1] * len(rows)),
        num_computed_tokens=ints(*computed),
        num_scheduled_tokens=ints(*scheduled),
        samples=np.array(samples),
        **parts,  # type: ignore[arg-type]
    )


def make(num_slots: int = 4, num_groups: int = 1) -> InputBatch:
    return InputBatch(num_slots=num_slots, max_model_len=32, block_size=4, num_groups=num_groups)


def test_prompts_and_decodes_are_packed_one_after_another() -> None:
    batch = make()
    first = output(
        [(2, 0, 3, False), (0, 4, 2, True)], new=[start(2, [5, 6, 7, 8], [3]), start(0, [*range(10, 16)], [1, 2], 4)]
    )
    batch.apply(first)
    inputs = batch.build(first)
    assert inputs.token_ids.tolist() == [5, 6, 7, 14, 15]
    assert inputs.positions.tolist() == [0, 1, 2, 4, 5]
    assert inputs.query_start.tolist() == [0, 3, 5]
    assert inputs.seq_lens.tolist() == [3, 6]
    assert inputs.slot_mappings[0].tolist() == [12, 13, 14, 8, 9]
    assert inputs.block_tables[0].tolist() == [[3, 0], [1, 2]]
    assert inputs.sampled_rows.tolist() == [4]


def test_a_sampled_token_is_the_next_input_without_being_sent() -> None:
    batch = make()
    first = output([(1, 0, 4, True)], new=[start(1, [5, 6, 7, 8], [3])])
    batch.apply(first)
    batch.append(ints(1), ints(4), ints(99))
    second = output([(1, 4, 1, True)], block_table_updates=[BlockTableUpdate(Slot(1, 1), 0, 1, ints(6))])
    batch.apply(second)
    inputs = batch.build(second)
    assert inputs.token_ids.tolist() == [99]
    assert inputs.slot_mappings[0].tolist() == [24]


def test_slots_beyond_the_first_size_are_taken() -> None:
    batch = make(num_slots=1)
    first = output([(9, 0, 2, True)], new=[start(9, [5, 6], [3])])
    batch.apply(first)
    assert batch.build(first).token_ids.tolist() == [5, 6]
    assert [request.params for request in batch.requests(ints(9))] == [GREEDY]


def test_a_finished_slot_forgets_its_request_and_may_be_reused_in_the_same_step() -> None:
    batch = make()
    batch.apply(output([(0, 0, 2, True)], new=[start(0, [5, 6], [3])]))
    batch.apply(output([(1, 0, 2, True)], new=[start(1, [7, 8], [4])], finished=[Slot(0, 1)]))
    with pytest.raises(RuntimeError, match="slot 0 is in the step, but no request holds it"):
        batch.requests(ints(0, 1))
    batch.apply(output([(1, 0, 2, True)], new=[start(1, [1, 2], [5])], finished=[Slot(1, 1)]))
    assert [request.request_id for request in batch.requests(ints(1))] == ["r1"]


def test_the_version_changes_whenever_a_slot_gets_another_request_and_only_then() -> None:
    batch = make()
    versions = [batch.version]
    first = output([(0, 0, 2, True)], new=[start(0, [5, 6], [3])])
    decode = output([(0, 2, 1, True)], block_table_updates=[BlockTableUpdate(Slot(0, 1), 0, 1, ints(4))])
    again = output([(0, 0, 2, True)], finished=[Slot(0, 1)], resumed=[start(0, [7, 8], [3])])
    for step in (first, decode, again):
        batch.apply(step)
        versions.append(batch.version)
    assert versions[0] != versions[1] == versions[2] != versions[3]


def test_each_group_has_its_own_tables_and_slot_mapping() -> None:
    batch = make(num_groups=2)
    windowed = dataclasses.replace(start(0, [*range(10)], [1, 2, 3]), block_ids=(ints(1, 2, 3), ints(0, 5, 6)))
    first = output([(0, 8, 2, True)], new=[windowed])
    batch.apply(first)
    inputs = batch.build(first)
    assert [table.tolist() for table in inputs.block_tables] == [[[1, 2, 3]], [[0, 5, 6]]]
    assert [mapping.tolist() for mapping in inputs.slot_mappings] == [[12, 13], [24, 25]]
    second = output([(0, 10, 3, True)], block_table_updates=[BlockTableUpdate(Slot(0, 1), 1, 3, ints(8))])
    batch.apply(second)
    with pytest.raises(RuntimeError, match="slot 0 has no block for the K/V of position 12 in KV group 0"):
        batch.build(second)


def test_a_token_is_never_written_to_the_null_block_nor_to_an_earlier_owners() -> None:
    batch = make()
    batch.apply(output([(0, 0, 8, True)], new=[start(0, [*range(8)], [1, 2])]))
    second = output([(0, 0, 5, True)], finished=[Slot(0, 1)], new=[start(0, [*range(5)], [4])])
    batch.apply(second)
    with pytest.raises(RuntimeError, match="slot 0 has no block for the K/V of position 4"):
        batch.build(second)
    null = output([(1, 0, 5, True)], new=[start(1, [*range(5)], [0, 7])])
    batch.apply(null)
    with pytest.raises(RuntimeError, match="slot 1 has no block for the K/V of position 0"):
        batch.build(null)


@pytest.mark.parametrize("block_size", [1, 4, 16, 33])
def test_the_last_position_of_the_longest_request_and_its_sampled_token_have_room(block_size: int) -> None:
    batch = InputBatch(num_slots=1, max_model_len=32, block_size=block_size, num_groups=1)
    blocks = [*range(1, -(-32 // block_size) + 1)]
    step = output([(0, 31, 1, True)], new=[start(0, [*range(32)], blocks, computed=31)])
    batch.apply(step)
    batch.build(step)
    batch.append(ints(0), ints(32), ints(9))
    beyond = output([(0, 32, 1, True)])
    if blocks[-1] * block_size > 32:
        assert batch.build(beyond).token_ids.tolist() == [9]  # its own last block has room
    else:
        with pytest.raises(RuntimeError, match="no block for the K/V of position 32"):
            batch.build(beyond)


def test_a_request_that_pools_is_not_taken_for_one_that_samples() -> None:
    wrong = RequestStart(
        request_id="p",
        slot=Slot(0, 1),
        token_ids=ints(1),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        block_ids=(ints(1),),
        params=PoolingParams(),
    )
    with pytest.raises(TypeError, match="pools"):
        make().apply(output([(0, 0, 1, True)], new=[wrong]))


def asking(*rows: tuple[int, int, int, bool, bool], **parts: object) -> SchedulerOutput:
    """Rows of (slot, computed, scheduled, samples, wants prompt logprobs)."""
    wants = np.array([row[4] for row in rows])
    return output([row[:4] for row in rows], wants_prompt_logprobs=wants, **parts)


def test_prompt_tokens_that_are_asked_for_follow_the_tokens_that_are_computed() -> None:
    batch = make()
    starts = [start(0, [*range(20, 30)], [1, 2, 3]), start(1, [*range(40, 45)], [4, 5]), start(2, [7], [6])]
    first = asking((0, 0, 4, False, True), (1, 0, 5, True, True), (2, 0, 1, True, True), new=starts)
    batch.apply(first)
    inputs = batch.build(first)
    assert [(one.row, one.request.request_id, one.start, one.token_ids.tolist()) for one in inputs.prompts] == [
        (0, "r0", 1, [21, 22, 23, 24]),  # the last one is of the next chunk
        (1, "r1", 1, [41, 42, 43, 44]),  # behind the last one comes no prompt token
    ]
    assert inputs.prompt_rows.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert inputs.sampled_rows.tolist() == [8, 9]
    second = asking((1, 5, 1, True, False), (0, 4, 6, True, True))
    batch.append(ints(1), ints(5), ints(99))
    batch.apply(second)
    inputs = batch.build(second)
    assert [(one.row, one.start, one.token_ids.tolist()) for one in inputs.prompts] == [(1, 5, [25, 26, 27, 28, 29])]
    assert inputs.prompt_rows.tolist() == [1, 2, 3, 4, 5]
    assert inputs.sampled_rows.tolist() == [0, 6]


def test_a_step_that_nobody_asks_in_has_no_prompt_rows() -> None:
    batch = make()
    first = output([(0, 0, 3, True)], new=[start(0, [1, 2, 3], [1])])
    batch.apply(first)
    inputs = batch.build(first)
    assert (inputs.prompts, inputs.prompt_rows.tolist()) == ((), [])


def test_output_tokens_of_a_resumed_request_are_not_of_its_prompt() -> None:
    batch = make()
    resumed = dataclasses.replace(start(0, [*range(10)], [1, 2, 3]), num_prompt_tokens=4)
    step = asking((0, 0, 10, True, True), resumed=[resumed])
    batch.apply(step)
    (rows,) = batch.build(step).prompts
    assert (rows.start, rows.token_ids.tolist()) == (1, [1, 2, 3])


def test_known_tokens_are_a_view_that_cannot_be_written_to() -> None:
    batch = make()
    batch.apply(output([(0, 0, 3, True)], new=[start(0, [5, 6, 7], [1])]))
    batch.append(ints(0), ints(3), ints(99))
    tokens = batch.tokens(0, 4)
    assert tokens.tolist() == [5, 6, 7, 99]
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    batch.append(ints(0), ints(4), ints(98))
    assert batch.tokens(0, 5).tolist() == [5, 6, 7, 99, 98]


def test_each_stay_gets_a_processor_of_its_own_and_one_that_fails_fails_when_it_is_called() -> None:
    made: list[RequestStart] = []

    def processors(entering: RequestStart) -> RowLogitsProcessor | None:
        made.append(entering)
        if entering.slot.index == 1:
            raise LogitsProcessorError("no such luck")
        return (lambda logits, output: None) if entering.slot.index == 0 else None

    batch = InputBatch(num_slots=4, max_model_len=32, block_size=4, num_groups=1, processors=processors)
    starts = [start(index, [1, 2], [index + 1]) for index in range(3)]
    batch.apply(output([(0, 0, 2, True), (1, 0, 2, True), (2, 0, 2, True)], new=starts))
    first, second, third = batch.requests(ints(0, 1, 2))
    assert first.processor is not None
    assert second.processor is not None
    assert third.processor is None
    with pytest.raises(LogitsProcessorError, match="no such luck"):
        second.processor(torch.zeros(5), ints())
    again = dataclasses.replace(starts[0], token_ids=ints(1, 2, 3))
    batch.apply(output([(0, 0, 3, True)], finished=[Slot(0, 1)], resumed=[again]))
    assert made == [*starts, again]
