"""Starvation, and the class of a run by its queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from run_records import NAN, TOTALS, Row, some_rows, table
from tokenyard.experiments.metrics_waiting import saturation, starvation
from tokenyard.experiments.records import RequestStatus, RunTotals

INSTANT = replace(TOTALS, busy_seconds=0.0)  # steps that take no time: nobody waits for a boundary


def queue(load: float, *, seed: int, number: int = 1000, slots: int = 1) -> list[Row]:
    """First come first served: Poisson arrivals and exponential service of mean 1 in each of the slots."""
    rng = np.random.default_rng(seed)
    free, rows = [0.0] * slots, []
    for arrival in np.cumsum(rng.exponential(1 / load, number)).tolist():
        slot = int(np.argmin(free))
        scheduled = max(arrival, free[slot])
        free[slot] = scheduled + float(rng.exponential(1.0))
        rows.append(Row(arrival=arrival, scheduled=scheduled, first=free[slot], finish=free[slot], output=1))
    return rows


def class_of(rows: Sequence[Row], totals: RunTotals = INSTANT) -> object:
    return saturation(table(rows), totals)["class"]


# Saturation


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("load", "expected"), [(0.3, "STABLE"), (0.7, "STABLE"), (1.3, "OVERLOADED"), (3, "OVERLOADED")]
)
def test_a_queue_with_too_much_load_is_overloaded_and_with_little_it_is_stable(
    load: float, expected: str, seed: int
) -> None:
    assert class_of(queue(load, seed=seed)) == expected


def test_a_closed_loop_of_more_than_run_at_once_is_backlogged() -> None:
    """Ten in the system, one of them runs; the next one comes when one has ended."""
    rows = [
        Row(arrival=max(0.0, n - 9.0), scheduled=float(n), first=n + 1.0, finish=n + 1.0, output=1) for n in range(500)
    ]
    assert class_of(rows) == "BACKLOGGED"


def test_a_long_queue_that_hardly_grows_is_backlogged() -> None:
    """About a hundred wait from the first tenth on, and a few more at the end."""
    scheduled = [n + 100.0 + 0.02 * n for n in range(1000)]
    rows = [
        Row(arrival=float(n), scheduled=at, first=at + 1.0, finish=at + 1.0, output=1) for n, at in enumerate(scheduled)
    ]
    found = saturation(table(rows), INSTANT)
    quarters = cast("list[float]", found["held_back_by_quarter"])
    assert quarters == sorted(quarters)
    assert found["class"] == "BACKLOGGED"


@pytest.mark.parametrize(("at_the_end", "expected"), [(30, "BACKLOGGED"), (60, "OVERLOADED")])
def test_a_queue_that_grows_counts_from_two_percent_of_the_requests_on(at_the_end: int, expected: str) -> None:
    scheduled = [n + at_the_end * n / 2000 for n in range(2000)]
    rows = [
        Row(arrival=float(n), scheduled=at, first=at + 1.0, finish=at + 1.0, output=1) for n, at in enumerate(scheduled)
    ]
    assert class_of(rows) == expected


def test_all_at_once_is_backlogged_when_they_do_not_all_run() -> None:
    rows = [Row(arrival=0.0, scheduled=float(n), first=n + 1.0, finish=n + 1.0, output=1) for n in range(50)]
    assert class_of(rows) == "BACKLOGGED"
    at_once = [replace(row, scheduled=0.0) for row in rows]
    assert class_of(at_once) == "STABLE"


def test_who_refuses_a_tenth_of_the_requests_is_overloaded_however_short_the_queue() -> None:
    rows = queue(0.3, seed=0)
    refused = {"scheduled": NAN, "first": NAN, "output": 0, "status": RequestStatus.REJECTED}
    every_ninth = [replace(row, **refused, finish=row.arrival) if n % 9 == 0 else row for n, row in enumerate(rows)]
    assert class_of(every_ninth) == "OVERLOADED"
    every_twentieth = [
        replace(row, **refused, finish=row.arrival) if n % 20 == 0 else row for n, row in enumerate(rows)
    ]
    assert class_of(every_twentieth) == "STABLE"


def test_waiting_for_the_next_step_is_not_being_held_back() -> None:
    rows = [Row(arrival=n * 1.0, scheduled=n + 0.99, first=n + 1.5, finish=n + 1.5, output=1) for n in range(50)]
    assert class_of(rows) == "BACKLOGGED"
    assert class_of(rows, replace(TOTALS, busy_seconds=100.0, num_steps=200)) == "STABLE"


def test_of_few_requests_nothing_is_said() -> None:
    assert class_of(queue(3.0, seed=0, number=19)) is None
    assert class_of(queue(3.0, seed=0, number=20)) is not None


@settings(max_examples=50)
@given(some_rows(max_size=30))
def test_the_numbers_behind_the_class_are_those_of_the_requests_held_back(rows: list[Row]) -> None:
    rows = [*rows, *[Row(arrival=7.0, scheduled=8.0, first=9.0, finish=9.0, output=1)] * 20]
    found = saturation(table(rows), INSTANT)
    last_end = max(t for row in rows for t in (row.arrival, row.scheduled, row.first, row.finish) if t == t)
    waits = [(row.arrival, next(t for t in (row.scheduled, row.finish, last_end) if t == t)) for row in rows]
    first, last = rows[0].arrival, 7.0
    assert found["held_back_at_last_arrival"] == (
        sum(end > last for _, end in waits) if last > first else sum(end > start for start, end in waits)
    )
    if last == first:
        return
    edges = [first + quarter * (last - first) / 4 for quarter in range(5)]
    points = sorted({*edges, *(time for wait in waits for time in wait if first <= time <= last)})
    by_quarter, covered = [0.0] * 4, 0.0
    for left, right in pairwise(points):
        number = sum(start <= left and end >= right for start, end in waits)
        quarter = max(index for index in range(4) if edges[index] <= left)
        by_quarter[quarter] += number * (right - left) / (edges[1] - edges[0])
        covered += (right - left) / (last - first) * (number > 0)
    assert found["held_back_by_quarter"] == pytest.approx(by_quarter)
    assert found["backlogged"] == pytest.approx(covered)


# Starvation


@settings(max_examples=50)
@given(some_rows())
def test_the_longest_wait_is_of_all_requests_those_that_never_ran_too(rows: list[Row]) -> None:
    found = starvation(table(rows))
    if not rows:
        assert found["max_wait"] is None
        return
    last_end = max(t for row in rows for t in (row.arrival, row.scheduled, row.first, row.finish) if t == t)
    waits = [next(t for t in (row.scheduled, row.finish, last_end) if t == t) - row.arrival for row in rows]
    assert found["max_wait"] == max(waits)
    assert waits[cast("int", found["request"])] == max(waits)
    assert found["num_never_scheduled"] == sum(math.isnan(row.scheduled) for row in rows)


def test_a_request_that_never_ran_waited_until_the_end() -> None:
    rows = [
        Row(arrival=0.0, scheduled=2.0, first=3.0, finish=10.0, output=2),
        Row(arrival=1.0, status=RequestStatus.UNFINISHED),
    ]
    assert starvation(table(rows)) == {"max_wait": 9.0, "request": 1, "num_never_scheduled": 1}
