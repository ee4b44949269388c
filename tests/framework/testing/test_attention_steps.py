"""tokenyard.testing.attention: steps that are what they say, and a reference that is compared with plain loops."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.interfaces import AttentionLayer
from tokenyard.testing.attention import (
    NO_BLOCKS,
    AttentionCase,
    alone,
    expect_attention,
    fused_rows,
    make_batch,
    make_case,
    reference,
    slot_mapping,
    tables_of,
)

lengths_strategy = st.lists(
    st.builds(lambda count, past: (count, count + past), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=3
)


def plain_loops(
    case: AttentionCase, layer: AttentionLayer, row: int, head: int, *, causal: bool = True
) -> tuple[list[float], float]:
    """One head of one query row, with nothing but Python's numbers."""
    starts = case.batch.query_start_loc.tolist()
    sequence = max(index for index, start in enumerate(starts[:-1]) if start <= row)
    position = case.batch.context_lens[sequence] - starts[sequence + 1] + row
    keys, values = case.keys[sequence].tolist(), case.values[sequence].tolist()
    kv_head = head * len(keys[0]) // case.query.shape[1]
    query = case.query[row, head].tolist()
    weights: dict[int, float] = {}
    for other, key in enumerate(keys):
        is_hidden = causal and other > position
        is_left = layer.sliding_window is not None and other <= position - layer.sliding_window
        if not is_hidden and not is_left:
            score = layer.scale * math.fsum(a * b for a, b in zip(query, key[kv_head], strict=True))
            score = score if layer.soft_cap is None else layer.soft_cap * math.tanh(score / layer.soft_cap)
            weights[other] = math.exp(score)
    sink = 0.0 if layer.sinks is None else math.exp(float(layer.sinks[head]))
    total = math.fsum(weights.values()) + sink
    size = len(values[0][kv_head])
    return [
        math.fsum(weight * values[other][kv_head][column] for other, weight in weights.items()) / total
        for column in range(size)
    ], math.log(total)


@given(
    lengths=lengths_strategy,
    group_size=st.sampled_from([1, 3]),
    window=st.one_of(st.none(), st.integers(1, 12)),
    soft_cap=st.sampled_from([None, 0.5, 30.0]),
    has_sinks=st.booleans(),
    causal=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_the_reference_equals_plain_loops(
    lengths: list[tuple[int, int]],
    group_size: int,
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
    causal: bool,
    dtype: torch.dtype,
) -> None:
    case = make_case(
        lengths=lengths,
        num_heads=2 * group_size,
        num_kv_heads=2,
        head_dim=4,
        v_head_dim=3,
        block_size=4,
        dtype=dtype,
    )
    sinks = torch.linspace(-1, 2, 2 * group_size) if has_sinks else None
    layer = AttentionLayer(index=0, scale=0.7, sliding_window=window, soft_cap=soft_cap, sinks=sinks)
    found = expect_attention(case, layer, causal=causal)
    for row in range(len(case.query)):
        for head in range(2 * group_size):
            out, lse = plain_loops(case, layer, row, head, causal=causal)
            assert found.out[row, head].tolist() == pytest.approx(out, abs=1e-12)
            assert float(found.lse[row, head]) == pytest.approx(lse, abs=1e-12)
    assert bool((found.out_limit > 0).all())
    assert bool((found.lse_limit > 0).all())


def test_limits_grow_with_the_type_the_scores_and_the_values() -> None:
    def limits(dtype: torch.dtype, scale: float) -> tuple[float, float]:
        case = make_case(lengths=[(3, 20)], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=dtype)
        found = expect_attention(case, AttentionLayer(index=0, scale=scale))
        return float(found.out_limit.max()), float(found.lse_limit.max())

    single, single_lse = limits(torch.float32, 0.125)
    assert single < 2e-5
    assert single_lse < 2e-5
    assert limits(torch.float16, 0.125)[0] > 50 * single
    assert 0.1 > limits(torch.bfloat16, 0.125)[0] > 4 * limits(torch.float16, 0.125)[0]
    assert limits(torch.float32, 0.5)[0] > 2 * single


@given(lengths=lengths_strategy, block_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_case_holds_the_past_and_nothing_else(lengths: list[tuple[int, int]], block_size: int, seed: int) -> None:
    case = make_case(
        lengths=lengths, num_heads=2, num_kv_heads=2, head_dim=4, v_head_dim=3, block_size=block_size, seed=seed
    )
    tables = tables_of(case.batch, block_size)
    assert len({block for row in tables for block in row}) == sum(map(len, tables))
    assert all(0 < block < len(case.kv_cache[0]) for row in tables for block in row)
    for cache, rows in zip(case.kv_cache, (case.keys, case.values), strict=True):
        flat = cache.flatten(0, 1)
        for blocks, each, (count, length) in zip(tables, rows, lengths, strict=True):
            slots = slot_mapping(blocks, block_size, 0, length)
            assert torch.equal(flat[slots[: length - count]], each[: length - count])
        written = sum(length - count for count, length in lengths)
        assert int((~flat.isnan()).flatten(1).all(1).sum()) == written
    step = [slot_mapping(row, block_size, end - count, end) for row, (count, end) in zip(tables, lengths, strict=True)]
    assert case.batch.slot_mapping.tolist() == [slot for each in step for slot in each.tolist()]


def test_a_batch_says_the_same_on_the_host_and_on_the_device() -> None:
    batch = make_batch([(1, 9), (3, 3)], [[4, 2, 7], [5]], 4, width=6)
    assert batch.query_start_loc.tolist() == [0, 1, 4]
    assert (batch.seq_lens.tolist(), list(batch.context_lens)) == ([9, 3], [9, 3])
    assert (list(batch.query_lens), batch.max_query_len, batch.max_seq_len) == ([1, 3], 3, 9)
    assert batch.host_block_table is not None
    assert (
        batch.block_table.tolist()
        == batch.host_block_table.tolist()
        == [
            [4, 2, 7, *NO_BLOCKS],
            [5, *NO_BLOCKS, *NO_BLOCKS[:2]],
        ]
    )
    assert batch.slot_mapping.tolist() == [28, 20, 21, 22]
    kinds = [each.dtype for each in (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping)]
    assert kinds == [torch.int32, torch.int32, torch.int32, torch.int64]


def test_a_sequence_alone_has_its_own_rows_and_the_same_reference() -> None:
    case = make_case(lengths=[(2, 5), (1, 7), (3, 3)], num_heads=4, num_kv_heads=2, head_dim=8, block_size=4)
    layer = AttentionLayer(index=0, scale=0.3, sliding_window=4)
    together = reference(case, layer)[0]
    for index, (low, high) in enumerate(pairwise(case.batch.query_start_loc.tolist())):
        assert torch.equal(reference(alone(case, index), layer)[0], together[low:high])


def test_fused_rows_are_views_of_one_tensor_with_the_same_numbers() -> None:
    whole = make_case(lengths=[(3, 4)], num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=4, block_size=4)
    fused = make_case(lengths=[(3, 4)], num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=4, block_size=4, fused=True)
    rows = (fused.query, fused.key, fused.value)
    assert {each.stride(0) for each in rows} == {4 * 8 + 2 * 8 + 2 * 4}
    assert len({each.untyped_storage().data_ptr() for each in rows}) == 1
    for each, plain in zip(fused_rows(whole.query, whole.key, whole.value), rows, strict=True):
        assert torch.equal(each, plain)
