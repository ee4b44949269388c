"""ClientService: how much service each client had got by when, and when it had requests waiting.

Service is prompt_weight * prompt tokens + output_weight * output tokens (VTC: 1 and 2), cached prompt tokens included,
recomputed ones not. A request table tells of each request when it was first scheduled (s), got its first token (f) and
ended (c): its prompt and first token are taken to be served evenly from s to f, the other tokens evenly from f to c.
What was computed of a prompt that never led to a token is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.experiments.metrics_latency import run_end
from tokenyard.experiments.metrics_statistics import pieces
from tokenyard.experiments.metrics_waiting import knows_schedule, running_ends, wait_ends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.experiments.metrics_statistics import Flags, Floats
    from tokenyard.experiments.records import RequestTable

MOST_CLIENTS = 32  # whose service is followed over time: those that got most
MOST_TIMES = 4096
NO_CLIENT = "(none)"


class ServiceWeights(NamedTuple):
    """What a token counts (VTC's w_p and w_q)."""

    prompt: float = 1.0
    output: float = 2.0


VTC_WEIGHTS = ServiceWeights()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientService:
    """C clients at K times. All times at which service or waiting changes if there are few, else some of them."""

    clients: tuple[str, ...]
    times: Floats  # [K] seconds, ascending
    served: Floats  # [C, K] up to then
    is_backlogged: Flags  # [C, K - 1] had a request waiting for its first step all the time between two of the times
    is_exact: bool  # whether `times` are all


def clients_of(requests: RequestTable) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """[N] number of the client of each, and their names; requests without a client have one together, the last."""
    numbers, names = requests.client, requests.clients
    if not len(numbers) or numbers.min() >= 0:
        return numbers, names
    return np.where(numbers < 0, np.int32(len(names)), numbers), (*names, NO_CLIENT)


def client_totals(
    requests: RequestTable, numbers: NDArray[np.int32], num_clients: int, weights: ServiceWeights = VTC_WEIGHTS
) -> Floats:
    """[C] what each client got in all: 100 prompt and 10 output tokens are 120; nothing without a token."""
    totals = np.zeros(num_clients)
    for piece in pieces(len(requests)):
        output = requests.output[piece]
        service = (requests.prompt[piece] * weights.prompt + output * weights.output) * (output > 0)
        totals += np.bincount(numbers[piece], weights=service, minlength=num_clients)
    return totals


def client_service(
    requests: RequestTable, weights: ServiceWeights = VTC_WEIGHTS, *, most_times: int = MOST_TIMES
) -> ClientService:
    """Of at most 32 clients, those that got most, in the order of their names in the table."""
    numbers, names = clients_of(requests)
    demand = np.bincount(numbers, minlength=len(names))
    ranked = np.lexsort((-demand, -client_totals(requests, numbers, len(names), weights)))
    chosen = sorted(index for index in ranked[:MOST_CLIENTS].tolist() if demand[index])
    waits = wait_ends(requests)
    times, is_exact = _times(requests, waits, most_times)
    rows = [np.flatnonzero(numbers == index) for index in chosen]
    is_known = knows_schedule(requests)
    backlogged = [_backlogged(requests.arrival, waits, row if is_known else row[:0], times) for row in rows]
    return ClientService(
        clients=tuple(names[index] for index in chosen),
        times=times,
        served=_stacked([served_by(requests, row, times, weights) for row in rows], len(times)),
        is_backlogged=_stacked(backlogged, max(0, len(times) - 1)) > 0,
        is_exact=is_exact,
    )


def served_by(
    requests: RequestTable, rows: NDArray[np.int64], times: Floats, weights: ServiceWeights = VTC_WEIGHTS
) -> Floats:
    """[K] what the requests in `rows` had got together by each of the times."""
    served, run_ended = np.zeros(len(times)), run_end(requests)
    for piece in pieces(len(rows)):
        some = rows[piece]
        some = some[requests.output[some] > 0]
        start, first, end = requests.first_scheduled[some], requests.first_token[some], requests.finish[some]
        start, end = np.where(np.isnan(start), requests.arrival[some], start), np.where(np.isnan(end), run_ended, end)
        prompt, output = requests.prompt[some].astype(np.float64), requests.output[some].astype(np.float64)
        served += _evenly(start, first, prompt * weights.prompt + weights.output, times)
        served += _evenly(first, end, (output - 1) * weights.output, times)
    return served


def _evenly(starts: Floats, ends: Floats, amounts: Floats, times: Floats) -> Floats:
    """[K] sum of what had been given by each time, of amounts that are given evenly from a start to an end."""
    is_long = ends > starts
    given = upto(ends, amounts, times)  # of all that have ended, those without length too; and of those under way:
    starts, ends, amounts = starts[is_long], ends[is_long], amounts[is_long]
    rates = amounts / (ends - starts)
    under_way = upto(starts, rates, times) - upto(ends, rates, times)
    since = upto(starts, rates * starts, times) - upto(ends, rates * starts, times)
    return given + times * under_way - since


def upto(moments: Floats, amounts: Floats, times: Floats, *, includes: bool = True) -> Floats:
    """[K] sum of the amounts whose moment has come by each time; without that time itself if it is not included."""
    order = np.argsort(moments, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(amounts[order])))
    return sums[np.searchsorted(moments[order], times, side="right" if includes else "left")]


def _times(requests: RequestTable, waits: Floats, most: int) -> tuple[Floats, bool]:
    """At most so many: those of all requests, or else of every so-manieth one."""
    columns = (requests.arrival, waits, requests.first_token, requests.finish)
    stride = max(1, -(-len(columns) * len(requests) // max(1, most - 2)))
    ends = [requests.arrival.min(initial=np.inf), run_end(requests)]
    moments = np.concatenate([column[::stride] for column in columns] + [ends])
    return np.unique(moments[np.isfinite(moments)]), stride == 1


def _backlogged(arrivals: Floats, waits: Floats, rows: NDArray[np.int64], times: Floats) -> Flags:
    """[K - 1] whether somebody of `rows` waits all the time between each two of the times: none of it is a gap."""
    changes, furthest = np.zeros(len(times) + 1, dtype=np.int64), -np.inf
    for piece in pieces(len(rows)):
        begins, ends = arrivals[rows[piece]], waits[rows[piece]]
        begins, ends = begins[ends > begins], ends[ends > begins]
        reached = running_ends(ends, furthest)
        _mark_gaps(changes, reached[:-1], begins, times)
        furthest = float(reached[-1])
    _mark_gaps(changes, np.array([furthest]), np.array([np.inf]), times)
    return np.equal(np.cumsum(changes)[: max(0, len(times) - 1)], 0)


def _mark_gaps(changes: NDArray[np.int64], starts: Floats, stops: Floats, times: Floats) -> None:
    """Count each gap that has a length into all of the cells, from one time to the next, that it meets."""
    starts, stops = starts[stops > starts], stops[stops > starts]
    first = np.maximum(np.searchsorted(times, starts, side="right") - 1, 0)
    behind = np.searchsorted(times, stops, side="left")
    np.add.at(changes, first, 1)
    np.add.at(changes, np.maximum(behind, first), -1)


def _stacked(rows: Sequence[NDArray[np.generic]], width: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(len(rows), width)
