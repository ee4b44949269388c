"""Biases, as the real package materialises them, against masks made from positions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import fake_xformers as fake
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenyard.interfaces import AttentionBatch
from tokenyard.testing.attention import make_batch, random_tables, slot_mapping
from tokenyard_backends.xformers import plan as planning
from tokenyard_backends.xformers.operators import Operators
from tokenyard_backends.xformers.plan import StepPlan

_BLOCK_SIZE = 64
_CPU = torch.device("cpu")
_FIXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

lengths_strategy = st.lists(
    st.one_of(
        st.integers(1, 400).map(lambda context: (1, context)),
        st.tuples(st.integers(2, 40), st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair))),
    ),
    min_size=1,
    max_size=7,
)
windows_strategy = st.one_of(st.none(), st.integers(1, 200))
Lengths = list[tuple[int, int]]


def a_plan(operators: Operators, lengths: Lengths) -> tuple[StepPlan, list[list[int]]]:
    """The plan of a step, and the blocks of each sequence."""
    tables, _ = random_tables([context for _, context in lengths], _BLOCK_SIZE, seed=len(lengths))
    batch: AttentionBatch = make_batch(lengths, tables, _BLOCK_SIZE)
    return StepPlan(operators.masks, batch, _BLOCK_SIZE), tables


def seen_positions(lengths: Lengths, window: int | None) -> list[tuple[int, range]]:
    """Of each query row its sequence and the positions that it sees."""
    return [
        (index, range(0 if window is None else max(0, position - window + 1), position + 1))
        for index, (count, context) in enumerate(lengths)
        for position in range(context - count, context)
    ]


def seen_slots(lengths: Lengths, tables: list[list[int]], window: int | None) -> list[set[int]]:
    """Of each query row the cache rows that it sees."""
    return [
        set(slot_mapping(tables[index], _BLOCK_SIZE, seen.start, seen.stop).tolist())
        for index, seen in seen_positions(lengths, window)
    ]


def told_slots(rows: torch.Tensor, sees: torch.Tensor) -> list[set[int]]:
    return [set(rows[row].tolist()) for row in sees]


@given(lengths=lengths_strategy, window=windows_strategy)
@_FIXED
def test_each_query_row_is_told_exactly_the_cache_rows_of_the_positions_it_sees(
    operators: Operators, lengths: Lengths, window: int | None
) -> None:
    plan, tables = a_plan(operators, lengths)
    work = plan.work(window)
    told: dict[int, set[int]] = {}
    if work.decode is not None:
        padded = len(work.decode.bias.block_tables)  # type: ignore[attr-defined]
        rows = range(padded) if work.decode.rows is None else work.decode.rows.tolist()
        slots = told_slots(*fake.paged_rows(work.decode.bias, padded))
        assert slots[work.decode.num_rows :] == [set()] * (padded - work.decode.num_rows)
        told |= dict(zip(rows[: work.decode.num_rows], slots, strict=False))
    for prompt in work.prompts:
        rows = range(sum(count for count, _ in lengths)) if prompt.rows is None else prompt.rows.tolist()
        gathered = prompt.slots if prompt.slots is not None else plan.slots[list(rows)]
        sees = prompt.bias.materialize((len(rows), len(gathered))) == 0  # type: ignore[attr-defined]
        told |= dict(zip(rows, told_slots(gathered, sees), strict=True))
    assert told == dict(enumerate(seen_slots(lengths, tables, window)))


@given(lengths=lengths_strategy, window=windows_strategy)
@_FIXED
def test_prompts_gather_no_row_that_none_of_their_queries_sees(
    operators: Operators, lengths: Lengths, window: int | None
) -> None:
    plan, tables = a_plan(operators, lengths)
    slots = [None if prompt.slots is None else prompt.slots.tolist() for prompt in plan.work(window).prompts]
    prompts = [index for index, (count, _) in enumerate(lengths) if count > 1]
    expected = []
    for index in prompts:
        count, context = lengths[index]
        first = 0 if window is None else max(0, context - count - window + 1)
        expected += slot_mapping(tables[index], _BLOCK_SIZE, first, context).tolist()
    assert slots in ([], [None], [expected])


@given(lengths=lengths_strategy, window=windows_strategy)
@_FIXED
def test_stand_in_masks_are_those_of_the_package(package: ModuleType, lengths: Lengths, window: int | None) -> None:
    works = [
        a_plan(operators, lengths)[0].work(window)
        for operators in (fake.fake_operators(), fake.operators_over(package))
    ]
    stand_in, real = ([work.decode, *work.prompts] for work in works)
    for ours, theirs in zip(stand_in, real, strict=True):
        if ours is not None and theirs is not None:
            assert fake.mask_name(ours.bias) == fake.mask_name(theirs.bias)
            assert torch.equal(mask_of(ours.bias), mask_of(theirs.bias))


def mask_of(bias: Any) -> torch.Tensor:
    if isinstance(bias, fake.FakeBias):
        num_queries, num_keys = sum(bias.query_lens), bias.keys[-1][1]
        is_paged = bias.block_tables is not None
    else:
        num_queries, num_keys = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
        is_paged = hasattr(bias, "block_tables")
    return fake.paged_rows(bias, num_queries)[1] if is_paged else bias.materialize((num_queries, num_keys)) == 0


def test_numbers_of_sequences_and_pages_are_powers_of_two_since_a_kernel_is_compiled_for_each(
    operators: Operators,
) -> None:
    shapes = []
    for count in (1, 2, 3, 5, 9, 17):
        plan, _ = a_plan(operators, [(1, _BLOCK_SIZE * count)] * count)
        decode = plan.work(None).decode
        assert decode is not None
        shapes.append(tuple(decode.bias.block_tables.shape))  # type: ignore[attr-defined]
    assert shapes == [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32)]


def test_prompts_are_gathered_in_groups_of_a_bounded_size(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_MAX_GATHERED_ROWS", 100)
    plan, _ = a_plan(operators, [(5, 60), (1, 9), (5, 40), (5, 41), (3, 3), (2, 200), (2, 9)])
    prompts = plan.work(None).prompts
    assert [None if prompt.slots is None else len(prompt.slots) for prompt in prompts] == [100, 44, 200, 9]


def test_a_window_reads_no_page_before_it(operators: Operators) -> None:
    plan, _ = a_plan(operators, [(1, 3000), (1, 40)])
    decode = plan.work(100).decode
    assert decode is not None
    assert decode.bias.block_tables.shape == (2, 2)  # type: ignore[attr-defined]


def test_what_is_called_has_the_recorded_signatures(package: ModuleType) -> None:
    assert fake.signatures_of(package) == fake.recorded()


def test_the_operators_take_what_supports_lets_through(package: ModuleType) -> None:
    paged, prompt = package.triton_splitk.FwOp, package.flash.FwOp
    assert paged.BLOCK_N == 64
    assert set(fake.PAGED_MASKS) <= {kind.__name__ for kind in paged.SUPPORTED_ATTN_BIAS_TYPES}
    assert set(fake.PROMPT_MASKS) <= {kind.__name__ for kind in prompt.SUPPORTED_ATTN_BIAS_TYPES}
    for operator in (paged, prompt):
        assert {torch.float16, torch.bfloat16} <= set(operator.SUPPORTED_DTYPES)
        assert operator.CUDA_MINIMUM_COMPUTE_CAPABILITY == (8, 0)
        assert operator.SUPPORTS_BMGHK
        assert operator.SUPPORTS_CUSTOM_SCALE
        for head_dim in (16, 32, 64, 128, 256):
            assert operator.shape_not_supported_reasons(1, 64, head_dim, head_dim) == []
    assert prompt.VARLEN_LSE_PACKED
    assert prompt.shape_not_supported_reasons(1, 64, 512, 512)


def test_the_paged_gappy_mask_cannot_be_made_from_lengths_so_it_is_made_from_the_unpaged_one(
    package: ModuleType,
) -> None:
    pages = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="should be len"):
        package.attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens([1], [3], [70], pages, 64)
