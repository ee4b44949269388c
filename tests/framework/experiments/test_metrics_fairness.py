"""Fairness between clients: every formula against the same one written out, at every time and for every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import NAN, Row, some_rows, table
from tokenyard.experiments.metrics_fairness import (
    fairness,
    jain,
    jain_backlogged,
    largest_difference,
    most_batch_tokens,
    vtc_bounds,
)
from tokenyard.experiments.metrics_service import (
    NO_CLIENT,
    ServiceWeights,
    client_service,
    clients_of,
    served_by,
)
from tokenyard.experiments.records import RequestStatus

THREE = ("a", "b", "c")


# Written out


def name(row: Row) -> str:
    return row.client or NO_CLIENT


def end_of_run(rows: Sequence[Row]) -> float:
    known = [time for row in rows for time in (row.arrival, row.scheduled, row.first, row.finish)]
    return max(time for time in known if not math.isnan(time))


def else_(time: float, other: float) -> float:
    return other if math.isnan(time) else time


def share(start: float, end: float, time: float) -> float:
    if time >= end:
        return 1.0
    return 0.0 if time <= start else (time - start) / (end - start)


def service_at(rows: Sequence[Row], client: str, time: float) -> float:
    total, last = 0.0, end_of_run(rows)
    for row in rows:
        if name(row) == client and row.output:
            total += (row.prompt + 2) * share(row.scheduled, row.first, time)
            total += 2 * (row.output - 1) * share(row.first, else_(row.finish, last), time)
    return total


def is_waiting(rows: Sequence[Row], client: str, time: float) -> bool:
    last = end_of_run(rows)
    return any(
        row.arrival < time < else_(row.scheduled, else_(row.finish, last)) for row in rows if name(row) == client
    )


def times_of(rows: Sequence[Row]) -> list[float]:
    known = {time for row in rows for time in (row.arrival, row.scheduled, row.first, row.finish)}
    return sorted(time for time in known if not math.isnan(time))


def largest_by_hand(rows: Sequence[Row], clients: Sequence[str]) -> float | None:
    """Over all pairs and all intervals between times of the run."""
    times, found = times_of(rows), []
    middles = [(left + right) / 2 for left, right in pairwise(times)]
    for pair in combinations(clients, 2):
        both = [all(is_waiting(rows, client, middle) for client in pair) for middle in middles]
        apart = [service_at(rows, pair[0], time) - service_at(rows, pair[1], time) for time in times]
        found += [
            abs(apart[stop] - apart[start])
            for start in range(len(middles))
            for stop in range(start + 1, len(times))
            if all(both[start:stop])
        ]
    return max(found, default=None)


# Service over time


@settings(max_examples=60)
@given(some_rows(), st.lists(st.floats(0, 12), min_size=1, max_size=5))
def test_service_grows_evenly_between_the_times_that_are_known(rows: list[Row], times: list[float]) -> None:
    requests, asked = table(rows), np.sort(np.array(times))
    numbers, names = clients_of(requests)
    for index, client in enumerate(names):
        served = served_by(requests, np.flatnonzero(numbers == index), asked)
        assert served == pytest.approx([service_at(rows, client, time) for time in asked.tolist()], abs=1e-9)


def test_service_worked_by_hand() -> None:
    row = Row(arrival=0.0, scheduled=1.0, first=3.0, finish=7.0, prompt=10, output=5, client="a")
    service = client_service(table([row]), ServiceWeights(prompt=1.0, output=2.0))
    assert service.times.tolist() == [0.0, 1.0, 3.0, 7.0]
    assert service.served.tolist() == [[0.0, 0.0, 12.0, 20.0]]
    assert served_by(table([row]), np.array([0]), np.array([2.0, 5.0])).tolist() == [6.0, 16.0]
    assert service.is_backlogged.tolist() == [[True, False, False]]


@settings(max_examples=60)
@given(some_rows(clients=THREE))
def test_backlogged_is_who_has_a_request_waiting_all_the_time(rows: list[Row]) -> None:
    service = client_service(table(rows))
    times = service.times.tolist()
    for client, flags in zip(service.clients, service.is_backlogged.tolist(), strict=True):
        middles = [(left + right) / 2 for left, right in pairwise(times)]
        assert flags == [is_waiting(rows, client, middle) for middle in middles]


@settings(max_examples=60)
@given(some_rows(clients=THREE), st.integers(8, 20))
def test_at_fewer_times_service_is_the_same_and_nobody_is_more_backlogged(rows: list[Row], most: int) -> None:
    service = client_service(table(rows), most_times=most)
    times = service.times.tolist()
    assert len(times) <= most
    for index, client in enumerate(service.clients):
        assert service.served[index] == pytest.approx([service_at(rows, client, time) for time in times], abs=1e-9)
        for cell in np.flatnonzero(service.is_backlogged[index]).tolist():
            inside = [time for time in times_of(rows) if times[cell] < time < times[cell + 1]]
            edges = [times[cell], *inside, times[cell + 1]]
            assert all(is_waiting(rows, client, (left + right) / 2) for left, right in pairwise(edges))


# How far clients drift apart


@settings(max_examples=60)
@given(some_rows(clients=THREE, max_size=8))
def test_the_largest_difference_is_over_all_intervals_in_which_two_are_backlogged(rows: list[Row]) -> None:
    service = client_service(table(rows))
    found, by_hand = largest_difference(service), largest_by_hand(rows, service.clients)
    assert (found and found.service) == (None if by_hand is None else pytest.approx(by_hand, abs=1e-9))


def test_the_largest_difference_counts_what_was_caught_up_again() -> None:
    """a is served 20 first, then b 20: at the end both have the same, and in between they were 20 apart."""
    rows = [
        Row(arrival=0.0, scheduled=0.0, first=1.0, finish=1.0, prompt=18, output=1, client="a"),
        Row(arrival=0.0, scheduled=1.0, first=2.0, finish=2.0, prompt=18, output=1, client="b"),
        Row(arrival=0.0, scheduled=2.0, first=3.0, finish=3.0, prompt=18, output=1, client="a"),
        Row(arrival=0.0, scheduled=2.0, first=3.0, finish=3.0, prompt=18, output=1, client="b"),
    ]
    found = largest_difference(client_service(table(rows)))
    assert found is not None
    assert found.service == 20.0
    assert (found.clients, found.span) == (("a", "b"), (0.0, 2.0))


def test_the_difference_is_of_service_by_weight() -> None:
    """From 0 to 4 both wait; a gets 12 and b 36, three times as much."""
    rows = [
        Row(arrival=0.0, scheduled=0.0, first=4.0, finish=4.0, prompt=10, output=1, client="a"),
        Row(arrival=0.0, scheduled=4.0, first=5.0, finish=5.0, prompt=10, output=1, client="a"),
        Row(arrival=0.0, scheduled=0.0, first=4.0, finish=4.0, prompt=34, output=1, client="b"),
        Row(arrival=0.0, scheduled=4.0, first=5.0, finish=5.0, prompt=34, output=1, client="b"),
    ]
    equal = fairness(table(rows), client_weights={}, kv_capacity_tokens=None)
    weighted = fairness(table(rows), client_weights={"b": 3.0}, kv_capacity_tokens=None)
    assert equal["max_service_difference"] == pytest.approx(24.0)
    assert weighted["max_service_difference"] == pytest.approx(0.0)


def test_service_outside_the_backlogged_span_is_no_difference() -> None:
    """b asks for nothing while a is served."""
    rows = [
        Row(arrival=0.0, scheduled=1.0, first=2.0, finish=9.0, prompt=500, output=100, client="a"),
        Row(arrival=9.0, scheduled=10.0, first=11.0, finish=11.0, prompt=1, output=1, client="b"),
    ]
    found = fairness(table(rows), client_weights={}, kv_capacity_tokens=None)
    assert found["max_service_difference"] is None
    assert found["jain_backlogged"] is None


def test_the_bounds_are_those_of_vtc() -> None:
    equal = np.array([1.0, 1.0])
    assert vtc_bounds(1000, 4000, equal) == {"vtc_bound": 16000.0, "lower_bound": 8000.0}
    assert vtc_bounds(9000, 4000, equal) == {"vtc_bound": 18000.0, "lower_bound": 8000.0}
    assert vtc_bounds(1000, 4000, 2 * equal) == {"vtc_bound": 8000.0, "lower_bound": 4000.0}
    assert vtc_bounds(1000, 4000, np.array([0.5, 2.0])) == {"vtc_bound": 32000.0, "lower_bound": None}
    rows = [Row(arrival=0.0, scheduled=0.0, first=1.0, finish=2.0, prompt=7, output=3, client=c) for c in "ab"]
    found = fairness(table(rows), client_weights={}, kv_capacity_tokens=100)
    assert (found["batch_tokens"], found["vtc_bound"], found["lower_bound"]) == (100, 400.0, 200.0)


@settings(max_examples=60)
@given(some_rows())
def test_without_a_capacity_m_is_the_most_that_the_batch_held(rows: list[Row]) -> None:
    times, held = times_of(rows), [0]
    for left, right in pairwise(times):
        held.append(
            sum(
                row.prompt + row.output
                for row in rows
                if row.scheduled <= left and else_(row.finish, end_of_run(rows)) >= right
            )
        )
    requests = table(rows)
    assert most_batch_tokens(requests, np.array(times)) == max(held)
    assert most_batch_tokens(requests, np.array(times[:1])) >= max(held)


# Jain's index


def test_jain_worked_by_hand() -> None:
    assert jain(np.array([1.0, 3.0])) == pytest.approx(0.8)
    assert jain(np.array([2.0, 2.0, 2.0])) == pytest.approx(1.0)
    assert jain(np.array([5.0, 0.0, 0.0, 0.0])) == 0.25
    assert jain(np.array([0.0, 0.0])) is None


def test_jain_is_of_what_each_client_with_demand_got_by_its_weight() -> None:
    rows = [
        Row(arrival=0.0, scheduled=0.0, first=1.0, finish=2.0, prompt=8, output=6, client="a"),
        Row(arrival=0.0, scheduled=0.0, first=1.0, finish=2.0, prompt=40, output=10, client="b"),
        Row(arrival=0.0, scheduled=NAN, finish=0.0, prompt=100, client="c", status=RequestStatus.REJECTED),
    ]
    found = fairness(table(rows), client_weights={"b": 3.0}, kv_capacity_tokens=None)
    assert found["num_clients"] == 3
    assert found["jain_service"] == pytest.approx(80**2 / (3 * (20**2 + 60**2)))
    assert found["jain_weighted_service"] == pytest.approx(40**2 / (3 * (20**2 + 20**2)))


def test_jain_of_the_backlogged_is_of_rates_while_both_ask_for_more() -> None:
    """From 0 to 4 both wait; a gets 12 and b 36 of service in that time. What follows is not contended."""
    rows = [
        Row(arrival=0.0, scheduled=0.0, first=4.0, finish=4.0, prompt=10, output=1, client="a"),
        Row(arrival=0.0, scheduled=4.0, first=5.0, finish=6.0, prompt=90, output=9, client="a"),
        Row(arrival=0.0, scheduled=0.0, first=4.0, finish=4.0, prompt=34, output=1, client="b"),
        Row(arrival=0.0, scheduled=4.0, first=5.0, finish=5.0, prompt=1, output=1, client="b"),
    ]
    service = client_service(table(rows))
    assert jain_backlogged(service, {}) == pytest.approx(48**2 / (2 * (12**2 + 36**2)))
    assert jain_backlogged(service, {"b": 3.0}) == pytest.approx(1.0)


def test_requests_without_a_client_are_one_client() -> None:
    rows = [Row(arrival=0.0, scheduled=0.0, first=1.0, finish=1.0, output=1, client=c) for c in (None, "a", None)]
    assert clients_of(table(rows))[1] == ("a", NO_CLIENT)
    assert fairness(table(rows), client_weights={}, kv_capacity_tokens=None)["num_clients"] == 2


def test_of_one_client_nothing_is_said() -> None:
    rows = [Row(arrival=0.0, scheduled=0.0, first=1.0, finish=1.0, output=1, client="a")]
    found = fairness(table(rows), client_weights={}, kv_capacity_tokens=None)
    assert found.pop("num_clients") == 1
    assert set(cast("dict[str, object]", found).values()) == {None}
