"""InputBatch: what a worker packs from the deltas that it is sent."""

from __future__ import annotations

import numpy as np
import pytest
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


def make(num_slots: int = 4) -> InputBatch:
    return InputBatch(num_slots=num_slots, max_model_len=32, block_size=4, num_groups=1)


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
    assert inputs.logits_rows.tolist() == [4]


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
    assert batch.sampling_params(ints(9)) == [GREEDY]


def test_a_finished_slot_forgets_its_parameters_and_may_be_reused_in_the_same_step() -> None:
    batch = make()
    batch.apply(output([(0, 0, 2, True)], new=[start(0, [5, 6], [3])]))
    batch.apply(output([(1, 0, 2, True)], new=[start(1, [7, 8], [4])], finished=[Slot(0, 1)]))
    assert batch.sampling_params(ints(0, 1)) == [GREEDY]
    batch.apply(output([(1, 0, 2, True)], new=[start(1, [1, 2], [5])], finished=[Slot(1, 1)]))
    assert batch.sampling_params(ints(1)) == [GREEDY]


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
