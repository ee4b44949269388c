"""Columns that grow, names as numbers, and the times between tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.experiments import columns
from tokenyard.experiments.columns import Column, GapCounter, Names, RareColumn

seconds = st.floats(1e-6, 1e4)


def test_a_column_keeps_what_it_holds_when_it_grows() -> None:
    column = Column(np.int32)
    for row in range(5000):
        column.reserve(row + 1)
        column.data[row] = row
    assert column.data[:5000].tolist() == list(range(5000))


@given(st.dictionaries(st.integers(0, 3000), st.integers(-5, 5)), st.integers(3001, 3500))
def test_a_rare_column_has_the_usual_value_where_nobody_put_one(put: dict[int, int], length: int) -> None:
    column = RareColumn(np.int32, -1)
    for row, value in put.items():
        column.put(row, value)
    assert column.values(length).tolist() == [put.get(row, -1) for row in range(length)]


def test_a_rare_column_of_usual_values_takes_no_memory() -> None:
    column = RareColumn(np.float64, np.nan)
    for row in range(10_000):
        column.put(row, np.nan)
    values = column.values(10_000)
    assert np.isnan(values).all()
    assert values.strides == (0,)


def test_names_are_numbered_as_they_appear_and_nobody_is_minus_one() -> None:
    names = Names()
    assert [names.number(name) for name in ("b", None, "a", "b")] == [0, -1, 1, 0]
    assert names.names == ("b", "a")


@given(st.lists(st.tuples(seconds, st.integers(1, 9)), max_size=60))
def test_every_gap_is_counted_once(given_gaps: list[tuple[float, int]]) -> None:
    counter = GapCounter()
    for gap, count in given_gaps:
        counter.add(gap, count)
    gaps = counter.gaps()
    assert int(gaps.counts.sum()) == sum(count for _, count in given_gaps)
    assert gaps.relative_error == 0
    found = sorted(np.repeat(gaps.seconds, gaps.counts).tolist())
    meant = sorted(gap for gap, count in given_gaps for _ in range(count))
    assert found == pytest.approx(meant, abs=1e-9)


def test_what_the_clock_s_rounding_tells_apart_is_one_gap() -> None:
    counter = GapCounter()
    start = 4096.0
    for _ in range(1000):
        counter.add((start + 0.0125) - start, 3)
        start += 0.0125
    assert len(counter.gaps().seconds) == 1


@given(st.lists(seconds, min_size=1, max_size=200))
def test_beyond_so_many_they_are_in_bins_as_wide_as_is_said(values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_MOST_GAPS", 4)
        counter = GapCounter()
        counter.extend(values)
        gaps = counter.gaps()
    assert int(gaps.counts.sum()) == len(values)
    found = np.sort(np.repeat(gaps.seconds, gaps.counts))
    assert found == pytest.approx(np.sort(values), rel=2 * max(gaps.relative_error, 1e-9), abs=1e-9)
