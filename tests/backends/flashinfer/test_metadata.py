"""Block tables to compressed rows: compared with a slow reference, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.testing.attention import make_batch, padded_table
from tokenyard_backends.flashinfer.metadata import (
    HostBatch,
    Pages,
    max_pages,
    num_shared_blocks,
    pages_of,
    prefix_pages,
    to_tensors,
)

lengths_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 90)).map(lambda pair: (pair[0], sum(pair))), min_size=1, max_size=8
)


def host_batch(lengths: list[tuple[int, int]], block_size: int, *, shared: int = 0, width: int = 200) -> HostBatch:
    """Distinct block ids; every sequence's first `shared` blocks are those of the first one."""
    tables = [
        [1000 * row + column for column in range(-(-length // block_size))] for row, (_, length) in enumerate(lengths)
    ]
    for row in tables:
        row[:shared] = range(min(shared, len(row)))
    return HostBatch(
        query_lens=np.array([count for count, _ in lengths], dtype=np.int32),
        context_lens=np.array([length for _, length in lengths], dtype=np.int32),
        block_table=padded_table(tables, width),
    )


def slow_rows(batch: HostBatch, block_size: int, window: int | None, skipped: int) -> list[tuple[list[int], int]]:
    """Pages of each sequence and tokens in its last one, one token at a time."""
    rows = []
    for count, length, table in zip(batch.query_lens, batch.context_lens, batch.block_table, strict=True):
        first_query = int(length) - int(count)
        first_seen = 0 if window is None else max(0, first_query - window + 1)
        pages: list[int] = []
        for position in range(max(first_seen // block_size, skipped) * block_size, int(length)):
            if position % block_size == 0:
                pages.append(int(table[position // block_size]))
        rows.append(
            (pages, sum(1 for position in range(int(length)) if position // block_size == (length - 1) // block_size))
        )
    return rows


@given(
    lengths=lengths_strategy,
    block_size=st.sampled_from([1, 2, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 60)),
    skip=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_pages_are_those_that_hold_what_the_queries_see(
    lengths: list[tuple[int, int]], block_size: int, window: int | None, skip: bool
) -> None:
    batch = host_batch(lengths, block_size, width=140)
    skipped = min(length - count for count, length in lengths) // block_size if skip else 0
    pages = pages_of(batch, block_size, window=window, skipped_blocks=skipped)
    expected = slow_rows(batch, block_size, window, skipped)
    bounds = pages.page_start.tolist()
    found = [pages.page_ids[low:high].tolist() for low, high in itertools.pairwise(bounds)]
    assert found == [row for row, _ in expected]
    assert pages.last_page_len.tolist() == [last for _, last in expected]
    assert pages.query_start.tolist() == np.cumsum([0, *(count for count, _ in lengths)]).tolist()
    assert bounds[-1] == len(pages.page_ids)
    for array in (pages.query_start, pages.page_start, pages.page_ids, pages.last_page_len):
        assert array.dtype == np.int32


@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 16, 32]),
    window=st.one_of(st.none(), st.integers(1, 90)),
)
@settings(max_examples=100, deadline=None)
def test_a_decoding_sequence_never_reads_more_pages_than_a_graph_has_room_for(
    contexts: list[int], block_size: int, window: int | None
) -> None:
    batch = host_batch([(1, context) for context in contexts], block_size, width=310)
    counts = np.diff(pages_of(batch, block_size, window=window).page_start)
    assert counts.max() <= max_pages(max(contexts), block_size, window)


@pytest.mark.parametrize(("context", "window"), [(4096, None), (4096, 100), (17, 100)])
def test_the_room_for_pages_is_used_up_by_some_sequence(context: int, window: int | None) -> None:
    counts = [
        np.diff(pages_of(host_batch([(1, length)], 16, width=260), 16, window=window).page_start)[0]
        for length in range(1, context + 1)
    ]
    assert max(counts) == max_pages(context, 16, window)


@given(
    lengths=lengths_strategy.filter(lambda rows: len(rows) > 1),
    shared=st.integers(0, 5),
    block_size=st.sampled_from([1, 8]),
)
@settings(max_examples=200, deadline=None)
def test_shared_blocks_are_leading_ones_that_all_have_and_that_lie_before_every_query(
    lengths: list[tuple[int, int]], shared: int, block_size: int
) -> None:
    batch = host_batch(lengths, block_size, shared=shared)
    found = num_shared_blocks(batch, block_size)
    limit = min(length - count for count, length in lengths) // block_size
    assert found == min(shared, limit)


def test_one_sequence_alone_shares_all_its_past_blocks() -> None:
    assert num_shared_blocks(host_batch([(3, 35)], 8), 8) == 4


def test_the_prefix_is_one_sequence_of_full_pages_that_all_query_rows_belong_to() -> None:
    pages = prefix_pages(host_batch([(1, 40), (3, 50)], 8, shared=4), 8, 4)
    assert pages.query_start.tolist() == [0, 4]
    assert pages.page_start.tolist() == [0, 4]
    assert pages.page_ids.tolist() == [0, 1, 2, 3]
    assert pages.last_page_len.tolist() == [8]


def test_a_batch_without_a_host_table_is_read_from_the_device() -> None:
    batch = make_batch([(1, 20), (2, 5)], [[3, 4], [5]], 16)
    host = HostBatch.of(batch)
    without = HostBatch.of(
        type(batch)(**{name: getattr(batch, name) for name in batch.__slots__ if name != "host_block_table"})
    )
    assert np.array_equal(host.block_table, without.block_table)
    assert not host.is_decode
    assert HostBatch.of(make_batch([(1, 20)], [[3, 4]], 16)).is_decode


def test_tensors_hold_the_same_numbers_as_the_arrays() -> None:
    pages = Pages(
        query_start=np.array([0, 2], dtype=np.int32),
        page_start=np.array([0, 3], dtype=np.int32),
        page_ids=np.array([7, 8, 9], dtype=np.int32),
        last_page_len=np.array([5], dtype=np.int32),
    )
    tensors = to_tensors(pages, torch.device("cpu"))
    for name in ("query_start", "page_start", "page_ids", "last_page_len"):
        assert getattr(tensors, name).tolist() == getattr(pages, name).tolist()
        assert getattr(tensors, name).dtype == torch.int32
