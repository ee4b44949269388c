"""How long requests took, a column each: seconds, NaN for what is not defined.

Of requests that finished alone; the others are told apart by `counts`. Times: a arrival, s first scheduled, f first
token, c last token; O output tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenyard.experiments.metrics_statistics import Floats
from tokenyard.experiments.records import RequestStatus

if TYPE_CHECKING:
    from tokenyard.experiments.metrics_statistics import Flags
    from tokenyard.experiments.records import RequestTable

AloneSeconds: TypeAlias = Callable[[NDArray[np.int32], NDArray[np.int32]], Floats]
"""Prompt and output tokens -> E2E of such a request on an idle server with an empty prefix cache."""


def is_finished(requests: RequestTable) -> Flags:
    return np.equal(requests.status, RequestStatus.FINISHED)


def ttft(requests: RequestTable) -> Floats:
    """f - a."""
    return _of_finished(requests, requests.first_token - requests.arrival)


def tpot(requests: RequestTable) -> Floats:
    """(c - f) / (O - 1): 101 tokens, the first at 1 s and the last at 3 s, are 0.02 s. Not defined for O <= 1."""
    return _per_token(requests, requests.finish - requests.first_token, requests.output - 1)


def e2e(requests: RequestTable) -> Floats:
    """c - a."""
    return _of_finished(requests, requests.finish - requests.arrival)


def normalised_latency(requests: RequestTable) -> Floats:
    """(c - a) / O: 3 s for 100 tokens are 0.03 s a token (Orca, OSDI'22)."""
    return _per_token(requests, requests.finish - requests.arrival, requests.output)


def queueing_delay(requests: RequestTable) -> Floats:
    """s - a (Vidur's scheduling delay). A preempted request's later waits are not in it."""
    return _of_finished(requests, requests.first_scheduled - requests.arrival)


def slowdown(requests: RequestTable, alone: AloneSeconds) -> Floats:
    """(c - a) / the same alone on an idle server: 1 at best, 1 / (1 - load) under processor sharing."""
    seconds = e2e(requests)
    seconds /= alone(requests.prompt, requests.output)
    return seconds


LATENCIES: Mapping[str, Callable[[RequestTable], Floats]] = {
    "ttft": ttft,
    "tpot": tpot,
    "e2e": e2e,
    "normalised_latency": normalised_latency,
    "queueing_delay": queueing_delay,
}


def latencies(alone: AloneSeconds | None) -> Mapping[str, Callable[[RequestTable], Floats]]:
    """All columns that can be made, by name."""
    if alone is None:
        return LATENCIES
    return {**LATENCIES, "slowdown": lambda requests: slowdown(requests, alone)}


def run_end(requests: RequestTable) -> float:
    """The last time that a run knows of; NaN without requests."""
    columns = (requests.arrival, requests.first_scheduled, requests.first_token, requests.finish)
    return float(np.fmax.reduce([np.fmax.reduce(column, initial=np.nan) for column in columns]))


def _of_finished(requests: RequestTable, seconds: Floats) -> Floats:
    seconds[~is_finished(requests)] = np.nan
    return seconds


def _per_token(requests: RequestTable, seconds: Floats, num_tokens: NDArray[np.int32]) -> Floats:
    has_tokens = num_tokens > 0
    seconds[~has_tokens] = np.nan
    np.divide(seconds, num_tokens, out=seconds, where=has_tokens)
    return _of_finished(requests, seconds)
