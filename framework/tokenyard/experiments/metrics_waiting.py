"""Who waited how long: starvation, and whether a run was overloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tokenyard.experiments.metrics_latency import run_end
from tokenyard.experiments.metrics_statistics import finite, pieces, ratio
from tokenyard.experiments.records import RequestStatus

if TYPE_CHECKING:
    from tokenyard.experiments.metrics_statistics import Floats
    from tokenyard.experiments.records import RequestTable, RunTotals

Saturation = Literal["STABLE", "BACKLOGGED", "OVERLOADED"]

LEAST_REQUESTS = 20  # of fewer nothing can be said
# Mean steps that a request may wait for its first one without being held back: for a step's end, under overlap for two.
GRACE_STEPS = 2
BACKLOGGED_SHARE = 0.9  # of the time of arrivals
UNSERVED_SHARE = 0.1  # of the requests, rejected or aborted
WAITING_SHARE, WAITING_AT_LEAST = 0.02, 10  # of the requests, at the last arrival
GROWTH = 1.5  # from the second quarter to the last; a queue that grows evenly has 7/3


def wait_ends(requests: RequestTable) -> Floats:
    """When each stopped waiting for its first step: it was scheduled, it ended without, or the run did."""
    ends = requests.first_scheduled.copy()
    for later in (requests.finish, np.broadcast_to(run_end(requests), ends.shape)):
        missing = np.isnan(ends)
        ends[missing] = later[missing]
    return ends


def knows_schedule(requests: RequestTable) -> bool:
    """Whether a target tells when requests were scheduled: one that has given tokens has scheduled."""
    return not bool(np.any(np.isnan(requests.first_scheduled) & (requests.output > 0)))


def starvation(requests: RequestTable) -> dict[str, object]:
    """The longest waits of all requests; those that never ran waited until their end, or that of the run.

    Percentiles by client, priority and length stand with those groups.
    """
    if not len(requests) or not knows_schedule(requests):
        return {"max_wait": None, "request": None, "num_never_scheduled": None}
    waits = wait_ends(requests)
    waits -= requests.arrival
    longest = int(np.argmax(waits))
    return {
        "max_wait": finite(float(waits[longest])),
        "request": int(requests.id[longest]),
        "num_never_scheduled": int(np.count_nonzero(np.isnan(requests.first_scheduled))),
    }


def saturation(requests: RequestTable, totals: RunTotals) -> dict[str, object]:
    """Whether the engine kept up, by its queue over the time in which requests arrived.

    A request is held back when it has waited longer than two mean steps. OVERLOADED: over a tenth of the requests was
    rejected or aborted; or the mean number held back grew from each quarter of that time to the next, by half or more
    from the second to the last, and at the last arrival at least 10 and 2 % of the requests were held back.
    BACKLOGGED: somebody was held back for 90 % of that time, but the queue did not grow. STABLE: neither. None: fewer
    than 20 requests, or a target that does not tell when it scheduled them.
    """
    if len(requests) < LEAST_REQUESTS or not knows_schedule(requests):
        return {"class": None, "held_back_by_quarter": None, "held_back_at_last_arrival": None, "backlogged": None}
    grace = GRACE_STEPS * (ratio(totals.busy_seconds, totals.num_steps) or 0.0)
    line = _line(requests.arrival, wait_ends(requests), grace)
    unserved = np.isin(requests.status, (RequestStatus.REJECTED, RequestStatus.ABORTED)).mean()
    return {
        "class": _class(line, float(unserved), len(requests)),
        "held_back_by_quarter": line.quarters,
        "held_back_at_last_arrival": line.at_last_arrival,
        "backlogged": line.backlogged,
    }


class _Line(NamedTuple):
    """Those that were held back, over the time of arrivals."""

    quarters: list[float]  # mean number in each quarter of it
    at_last_arrival: int
    backlogged: float  # share of it in which there was somebody


def _class(line: _Line, unserved: float, total: int) -> Saturation:
    first, second, third, fourth = line.quarters
    grows = first < second < third < fourth and fourth >= GROWTH * second
    is_long = line.at_last_arrival >= max(WAITING_AT_LEAST, WAITING_SHARE * total)
    if unserved > UNSERVED_SHARE or (grows and is_long):
        return "OVERLOADED"
    return "BACKLOGGED" if line.backlogged >= BACKLOGGED_SHARE else "STABLE"


def _line(arrivals: Floats, wait_ends: Floats, grace: float) -> _Line:
    """`arrivals` ascend; when all come at once, the line is the one that they form then."""
    first, last = float(arrivals[0]), float(arrivals[-1])
    edges = np.linspace(first, last, 5)
    open_seconds, waiting, covered, furthest = np.zeros(4), 0, 0.0, first
    for piece in pieces(len(arrivals)):
        begins, ends = arrivals[piece] + grace, wait_ends[piece]
        begins, ends = begins[ends > begins], ends[ends > begins]
        waiting += int(np.count_nonzero((begins <= last) & (ends > last))) if last > first else len(begins)
        for quarter in range(4):
            overlap = np.minimum(ends, edges[quarter + 1]) - np.maximum(begins, edges[quarter])
            open_seconds[quarter] += np.maximum(overlap, 0.0).sum()
        upto = running_ends(ends, furthest)
        covered += float(np.maximum(np.minimum(ends, last) - np.maximum(begins, upto[:-1]), 0.0).sum())
        furthest = float(upto[-1])
    if not last > first:
        return _Line([0.0] * 4, waiting, float(waiting > 0))
    return _Line((4 * open_seconds / (last - first)).tolist(), waiting, covered / (last - first))


def running_ends(ends: Floats, furthest: float) -> Floats:
    """[n + 1] `furthest`, and how far the intervals up to each reach, in order of their begins."""
    return np.maximum.accumulate(np.concatenate(([furthest], ends)))
