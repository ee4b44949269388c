"""What is left of a GPU for the K/V cache, and what is said when that is nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_device import FullMemory
from tokenyard.config import SchedulerConfig
from tokenyard.errors import CapacityError
from tokenyard.worker.device_memory import MemoryReading, check_free, kv_cache_bytes, shares
from tokenyard.worker.memory_profile import MemoryProfile
from tokenyard.worker.profile_step import first_steps, largest_step, query_lens

GIB = 2**30
SIZES = st.integers(0, 80 * GIB)


def reading(free: float, reserved: float = 0, allocated: float = 0, peak: float = 0) -> MemoryReading:
    """In GiB, of 80 GiB."""
    return MemoryReading(
        total=80 * GIB,
        free=int(free * GIB),
        reserved=int(reserved * GIB),
        allocated=int(allocated * GIB),
        peak=int(max(peak, allocated) * GIB),
    )


START = reading(free=79)  # 1 GiB is the context's
LOADED = reading(free=62, reserved=16.5, allocated=16)
PROFILED = reading(free=56, reserved=22, allocated=16, peak=20)  # 1 GiB more outside torch


def test_the_cache_gets_the_share_less_weights_activations_graphs_and_what_came_outside_torch() -> None:
    taken = shares(70 * GIB, START, LOADED, PROFILED, graph_share=0.25)
    assert (taken.weights, taken.activations, taken.graphs, taken.outside) == (16 * GIB, 4 * GIB, GIB, GIB)
    assert taken.kv_cache == (70 - 16 - 4 - 1 - 1) * GIB
    assert kv_cache_bytes(taken, max_num_batched_tokens=1, max_num_seqs=1) == taken.kv_cache


@given(SIZES, SIZES, SIZES, SIZES, st.floats(0.01, 1), st.floats(0, 1))
def test_what_is_given_out_never_exceeds_what_was_free(
    other: int, weights: int, activations: int, outside: int, utilization: float, graph_share: float
) -> None:
    """Of a device on which all this happens: then weights, activations, graphs, libraries and cache fit beside it."""
    total = 80 * GIB
    start = MemoryReading(total=total, free=total - other, reserved=0, allocated=0, peak=0)
    used = other + outside + weights + activations
    if used > total:
        return
    loaded = MemoryReading(total=total, free=total - other - weights, reserved=weights, allocated=weights, peak=weights)
    after = MemoryReading(
        total=total,
        free=total - used,
        reserved=weights + activations,
        allocated=weights,
        peak=weights + activations,
    )
    try:
        wanted = check_free(start, utilization)
        taken = shares(wanted, start, loaded, after, graph_share)
        cache = kv_cache_bytes(taken, max_num_batched_tokens=1, max_num_seqs=1)
    except CapacityError:
        assert start.free < int(utilization * total) or wanted <= used - other + taken.graphs
        return
    assert cache > 0
    assert used + taken.graphs + cache <= total
    assert used - other + taken.graphs + cache == int(utilization * total)


def test_tensors_of_another_engine_in_this_process_are_not_this_ones_weights() -> None:
    start = reading(free=69, reserved=10, allocated=10, peak=10)
    loaded = reading(free=53, reserved=26, allocated=26)
    profiled = reading(free=50, reserved=29, allocated=26, peak=29)
    taken = shares(60 * GIB, start, loaded, profiled, graph_share=0)
    assert (taken.weights, taken.activations, taken.outside) == (16 * GIB, 3 * GIB, 0)


def test_memory_that_others_hold_is_told_with_what_to_do() -> None:
    with pytest.raises(CapacityError) as caught:
        check_free(reading(free=30), 0.92)
    text = str(caught.value)
    for part in ("0.92", "73.60 GiB", "80.00 GiB", "30.00 GiB", "50.00 GiB", "nvidia-smi", "lower it to 0.37 or less"):
        assert part in text
    assert check_free(reading(free=30), 0.37) == int(0.37 * 80 * GIB)
    with pytest.raises(CapacityError, match=r"context; free memory$"):
        check_free(reading(free=0.1), 0.5)


def test_when_nothing_is_left_every_number_is_told_and_what_to_change() -> None:
    taken = shares(21 * GIB, START, LOADED, PROFILED, graph_share=0.25)
    with pytest.raises(CapacityError) as caught:
        kv_cache_bytes(taken, max_num_batched_tokens=8192, max_num_seqs=256)
    numbers = re.findall(r"[\d.]+ GiB", str(caught.value))
    assert numbers == ["21.00 GiB", "16.00 GiB", "4.00 GiB", "1.00 GiB", "1.00 GiB"]
    for part in ("max_num_batched_tokens=8192", "max_num_seqs=256", "raise the first, or lower one of the other two"):
        assert part in str(caught.value)


def test_a_profile_reads_before_loading_after_it_and_after_the_largest_step() -> None:
    memory = FullMemory(START, LOADED, PROFILED)
    profile = MemoryProfile(memory, 0.5)
    memory.log.append("load")
    scheduler = SchedulerConfig(max_num_batched_tokens=100, max_num_seqs=10)
    found = profile.kv_cache_bytes(lambda: memory.log.append("step"), scheduler, 25)
    assert found == (40 - 16 - 4 - 1 - 1) * GIB
    assert memory.log == ["restart", "read", "load", "restart", "read", "step", "read", "restart"]


def test_a_step_that_does_not_fit_names_the_settings_that_make_it_large() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee the manual")

    profile = MemoryProfile(FullMemory(START), 0.5)
    with pytest.raises(
        CapacityError, match=r"max_num_batched_tokens=64 and .*max_num_seqs=8 .*Tried to allocate 9 GiB"
    ):
        profile.kv_cache_bytes(fail, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8), 0)


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(2, 3000))
def test_the_largest_step_has_as_many_rows_and_tokens_as_a_step_may_have(tokens: int, seqs: int, longest: int) -> None:
    lengths = query_lens(tokens, seqs, longest)
    assert len(lengths) == min(tokens, seqs)
    assert all(1 <= length <= longest for length in lengths)
    assert sum(lengths) == min(tokens, len(lengths) * longest)
    assert lengths[0] == min(longest, tokens - len(lengths) + 1)


@given(st.integers(1, 300), st.integers(1, 20), st.integers(2, 90), st.integers(1, 32), st.integers(1, 3))
def test_its_rows_end_sequences_of_the_greatest_length_and_need_one_block(
    tokens: int, seqs: int, longest: int, block_size: int, num_groups: int
) -> None:
    step = largest_step(
        num_tokens=tokens, num_seqs=seqs, max_model_len=longest, block_size=block_size, num_groups=num_groups
    )
    assert step.samples.all()
    assert (step.num_computed_tokens + step.num_scheduled_tokens == longest).all()
    for start in step.new:
        assert len(start.block_ids) == num_groups
        for blocks in start.block_ids:
            assert len(blocks) * block_size >= longest
            assert np.unique(blocks).tolist() == [1]


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 90), st.integers(1, 32), st.integers(1, 3))
def test_the_first_steps_are_one_of_decoding_rows_and_one_with_part_of_a_prompt_where_the_limits_allow_it(
    tokens: int, seqs: int, longest: int, block_size: int, num_groups: int
) -> None:
    decoding, mixed = first_steps(
        num_tokens=tokens, num_seqs=seqs, max_model_len=longest, block_size=block_size, num_groups=num_groups
    )
    for step in (decoding, mixed):
        assert step.num_rows == min(2, seqs, tokens)
        assert step.num_scheduled_tokens.sum() <= tokens
        assert (step.num_computed_tokens + step.num_scheduled_tokens == longest).all()
    assert set(decoding.num_scheduled_tokens.tolist()) == {1}
    assert mixed.num_scheduled_tokens[0] == min(
        16 if min(seqs, tokens) > 1 else 17, longest, tokens - mixed.num_rows + 1
    )
