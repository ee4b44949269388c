"""Fairness between clients: Jain's index, and how far apart the service of backlogged clients drifts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.experiments.metrics_latency import run_end
from tokenyard.experiments.metrics_service import VTC_WEIGHTS, client_service, client_totals, clients_of, upto
from tokenyard.experiments.metrics_statistics import finite, pieces, ratio

if TYPE_CHECKING:
    from tokenyard.arrays import LongArray
    from tokenyard.experiments.metrics_service import ClientService, ServiceWeights
    from tokenyard.experiments.metrics_statistics import Flags, Floats
    from tokenyard.experiments.records import RequestTable

_UNKNOWN = dict.fromkeys(
    (
        *("jain_service", "jain_weighted_service", "jain_backlogged", "max_service_difference", "clients", "span"),
        *("is_exact", "batch_tokens", "vtc_bound", "lower_bound"),
    )
)


EQUAL: Mapping[str, float] = MappingProxyType({})


class Difference(NamedTuple):
    """How far apart two clients drifted while both were backlogged."""

    service: float
    clients: tuple[str, str]
    span: tuple[float, float]  # of time, both backlogged throughout


def jain(values: Floats) -> float | None:
    """(sum x)^2 / (n sum x^2), from 1/n to 1 (Jain, 1984): of 1 and 3, 16 / 20 = 0.8. None where all are 0."""
    squares = float(values @ values)
    return ratio(float(values.sum()) ** 2, len(values) * squares)


def fairness(
    requests: RequestTable,
    *,
    client_weights: Mapping[str, float],
    kv_capacity_tokens: int | None,
    weights: ServiceWeights = VTC_WEIGHTS,
) -> dict[str, object]:
    """Between clients that have sent requests; None where there are fewer than two.

    `kv_capacity_tokens` is VTC's M, the most tokens that a running batch can hold; without it, M is the most that this
    run's batch held. A client that `client_weights` does not name weighs 1.
    """
    numbers, names = clients_of(requests)
    present = np.flatnonzero(np.bincount(numbers, minlength=len(names)))
    if len(present) < 2:
        return {"num_clients": len(present)} | _UNKNOWN
    service = client_totals(requests, numbers, len(names), weights)[present]
    shares = np.array([client_weights.get(names[index], 1.0) for index in present.tolist()])
    over_time = client_service(requests, weights)
    difference = largest_difference(over_time, client_weights)
    batch = kv_capacity_tokens if kv_capacity_tokens is not None else most_batch_tokens(requests, over_time.times)
    return {
        "num_clients": len(present),
        "jain_service": jain(service),
        "jain_weighted_service": jain(service / shares),
        "jain_backlogged": jain_backlogged(over_time, client_weights),
        "max_service_difference": None if difference is None else finite(difference.service),
        "clients": None if difference is None else list(difference.clients),
        "span": None if difference is None else list(difference.span),
        "is_exact": over_time.is_exact,
        "batch_tokens": batch,
        **vtc_bounds(int(requests.prompt.max()), batch, shares, weights),
    }


def vtc_bounds(
    longest_prompt: int, batch_tokens: int, shares: Floats, weights: ServiceWeights = VTC_WEIGHTS
) -> dict[str, float | None]:
    """VTC's bound 2U, U = max(w_p * longest prompt, w_q * M), and the lower bound w_q * M (Sheng et al., OSDI'24).

    A prompt of 1000 and a batch of 4000 tokens: U = max(1000, 8000), so 16000 and 8000. Counters of service / share
    grow by U / the smallest share at most; for shares that differ no lower bound is known.
    """
    lower, least = weights.output * batch_tokens, float(shares.min())
    upper = 2 * max(weights.prompt * longest_prompt, lower) / least
    return {"vtc_bound": finite(upper), "lower_bound": finite(lower / least) if (shares == least).all() else None}


def largest_difference(service: ClientService, client_weights: Mapping[str, float] = EQUAL) -> Difference | None:
    """Largest |W_f(t1, t2) - W_g(t1, t2)| of two clients over all intervals in which both are backlogged throughout.

    W is service / weight. It is the range of W_f - W_g within such a span, not its value at the end. None where no two
    ever were.
    """
    shares = [client_weights.get(name, 1.0) for name in service.clients]
    found: Difference | None = None
    for f, g in combinations(range(len(service.clients)), 2):
        both = service.is_backlogged[f] & service.is_backlogged[g]
        if not both.any():
            continue
        starts, stops = _runs(both)
        ranges = _ranges(service.served[f] / shares[f] - service.served[g] / shares[g], starts, stops)
        most = int(np.argmax(ranges))
        if found is None or ranges[most] > found.service:
            span = (float(service.times[starts[most]]), float(service.times[stops[most]]))
            found = Difference(float(ranges[most]), (service.clients[f], service.clients[g]), span)
    return found


def jain_backlogged(service: ClientService, client_weights: Mapping[str, float]) -> float | None:
    """Jain's index of service a second and weight, of each client over the time in which it and another are backlogged.

    Demand that is too small to fill a share does not make this unfair, unlike the index of all service. None where no
    two clients were ever backlogged together.
    """
    backlogged, seconds = service.is_backlogged, np.diff(service.times)
    contended = backlogged & (backlogged.sum(axis=0) >= 2)
    time = contended @ seconds
    got = (contended * np.diff(service.served, axis=1)).sum(axis=1)
    weights = np.array([client_weights.get(name, 1.0) for name in service.clients])
    some = time > 0
    return jain(got[some] / time[some] / weights[some]) if some.any() else None


def most_batch_tokens(requests: RequestTable, times: Floats) -> int:
    """Most prompt and output tokens of requests that ran at once, each counted whole from its first step to its end.

    `times` ascend, and the first one is not after the first step. Those that ran at any time between two of them are
    counted together: with all times at which something began or ended that is exact, with fewer it is no less.
    """
    held, run_ended = np.zeros(len(times)), run_end(requests)
    behind = np.append(times[1:], np.inf)
    for piece in pieces(len(requests)):
        starts, ends = requests.first_scheduled[piece], requests.finish[piece]
        ran = ~np.isnan(starts)
        tokens = requests.prompt[piece][ran].astype(np.float64) + requests.output[piece][ran]
        ends = np.where(np.isnan(ends), run_ended, ends)[ran]
        held += upto(starts[ran], tokens, behind, includes=False) - upto(ends, tokens, times)
    return round(float(held.max(initial=0.0)))


def _runs(flags: Flags) -> tuple[LongArray, LongArray]:
    """First and last point of each run of cells: cell i lies between the points i and i + 1."""
    changes = np.diff(np.concatenate(([False], flags, [False])).astype(np.int8))
    return np.flatnonzero(changes == 1).astype(np.int64), np.flatnonzero(changes == -1).astype(np.int64)


def _ranges(values: Floats, starts: LongArray, stops: LongArray) -> Floats:
    """Largest minus smallest value from each start to its stop, both included."""
    edges = np.column_stack((starts, stops + 1)).ravel()
    padded = np.append(values, values[-1])  # an edge may lie one behind the last value
    return np.maximum.reduceat(padded, edges)[::2] - np.minimum.reduceat(padded, edges)[::2]
