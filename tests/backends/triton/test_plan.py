"""What a step's plan says, found out on the host."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.testing.attention import make_batch
from tokenyard_backends.triton.plan import (
    MAX_SPLITS,
    Counting,
    GrowingBuffer,
    decoding_sequences,
    most_splits,
    packed_to_device,
    prompt_tiles,
)
from tokenyard_backends.triton.tiles import padded

lengths_strategy = st.lists(
    st.tuples(st.integers(1, 70), st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=12
)


@given(lengths=lengths_strategy, tokens=st.integers(1, 64))
def test_every_query_row_is_in_one_place(lengths: list[tuple[int, int]], tokens: int) -> None:
    batch = make_batch(lengths, [[0] * 400] * len(lengths), 1)
    decoding = decoding_sequences(batch).tolist()
    tiles = prompt_tiles(batch, tokens)
    assert tiles.dtype == np.int32
    assert tiles.shape[1] == 2
    rows = [(sequence, row) for sequence, first in tiles.tolist() for row in range(first, first + tokens)]
    rows = [(sequence, row) for sequence, row in rows if row < lengths[sequence][0]]
    rows += [(sequence, 0) for sequence in decoding]
    assert sorted(rows) == [(index, row) for index, (count, _) in enumerate(lengths) for row in range(count)]
    assert all(lengths[sequence][0] == 1 for sequence in decoding)


@given(lengths=lengths_strategy, tokens=st.integers(1, 64))
def test_tiles_with_more_keys_come_first(lengths: list[tuple[int, int]], tokens: int) -> None:
    batch = make_batch(lengths, [[0] * 400] * len(lengths), 1)
    ends = [
        lengths[sequence][1] - lengths[sequence][0] + first for sequence, first in prompt_tiles(batch, tokens).tolist()
    ]
    assert ends == sorted(ends, reverse=True)


@given(num_sequences=st.integers(0, 40), num_tiles=st.integers(0, 40))
def test_what_is_packed_comes_apart_again(num_sequences: int, num_tiles: int) -> None:
    sequences = np.arange(num_sequences, dtype=np.int32)
    tiles = np.arange(100, 100 + 2 * num_tiles, dtype=np.int32).reshape(-1, 2)
    there = packed_to_device(sequences, tiles, torch.device("cpu"))
    for given_array, tensor in zip((sequences, tiles), there, strict=True):
        assert np.array_equal(tensor.numpy(), given_array)
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


@given(
    longest=st.integers(1, 200_000),
    length=st.integers(1, 200_000),
    window=st.one_of(st.none(), st.integers(1, 10_000)),
    split_tokens=st.integers(1, 4096),
    keys=st.sampled_from([16, 32, 64]),
)
def test_a_grid_for_the_longest_has_room_for_the_splits_of_every_other(
    longest: int, length: int, window: int | None, split_tokens: int, keys: int
) -> None:
    """As the kernels compute them: `split_size` in `running_softmax`."""
    length = min(length, longest)
    num_keys = length if window is None else min(length, window)
    size = max(split_tokens, math.ceil(math.ceil(num_keys / MAX_SPLITS) / keys) * keys)
    assert -(-num_keys // size) <= most_splits(longest, window, split_tokens) <= MAX_SPLITS
    assert most_splits(longest, window, split_tokens) <= most_splits(longest, None, split_tokens)


def test_a_buffer_grows_and_leaves_those_who_hold_the_old_one_alone() -> None:
    buffer = GrowingBuffer(torch.device("cpu"), torch.float32)
    first = buffer.take(10)
    assert buffer.take(5).data_ptr() == first.data_ptr()
    assert buffer.take(11).numel() >= 11
    assert first.numel() == 10


def test_counting_keeps_its_numbers_where_they_were() -> None:
    counting = Counting(torch.device("cpu"))
    first = counting.take(3)
    assert first.tolist() == [0, 1, 2]
    assert counting.take(200).data_ptr() == first.data_ptr()
    assert counting.take(300).tolist() == list(range(300))
    assert first.tolist() == [0, 1, 2]


@given(size=st.integers(1, 256))
def test_a_tiles_side_is_a_power_of_two_that_holds_a_head(size: int) -> None:
    side = padded(size)
    assert side >= max(16, size)
    assert side & (side - 1) == 0
    assert side == 16 or side < 2 * size
