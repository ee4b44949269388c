"""Goodput: what was served as well as it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.experiments.metrics_latency import LATENCIES, is_finished
from tokenyard.experiments.metrics_statistics import ratio

if TYPE_CHECKING:
    from tokenyard.experiments.metrics_statistics import Flags
    from tokenyard.experiments.records import RequestTable
    from tokenyard.experiments.slo import SLO

ATTAINMENT = 0.9
"""Of all requests, that DistServe's goodput asks for."""


def is_good(requests: RequestTable, slo: SLO) -> Flags:
    """Whether each finished and met every limit that is set. Rejected, aborted and unfinished requests are not good."""
    good = is_finished(requests)
    for name in slo.limits:
        good &= meets(requests, slo, name)
    return good


def meets(requests: RequestTable, slo: SLO, name: str) -> Flags:
    """Whether each finished within one limit; TPOT is 0 where there is no second token, as vLLM's bench has it."""
    seconds = LATENCIES[name](requests)
    if name == "tpot":
        seconds[requests.output <= 1] = 0.0
    return is_finished(requests) & (seconds <= slo.limits[name])


def goodput(requests: RequestTable, slo: SLO, duration: float | None) -> dict[str, object]:
    """Without a limit there is no goodput.

    goodput = good requests / duration (vLLM bench, SCORPIO); attainment = good / all; token_goodput = output tokens of
    good requests / duration. 100 requests in 50 s, 80 finished, 60 of them good: 1.2 a second, attainment 0.6.
    """
    if not slo.limits:
        return {"slo": {}, "goodput": None, "attainment": None, "attainment_by_slo": {}, "token_goodput": None}
    good = is_good(requests, slo)
    return {
        "slo": dict(slo.limits),
        "goodput": ratio(float(good.sum()), duration),
        "attainment": ratio(float(good.sum()), len(requests)),
        "attainment_by_slo": {
            name: ratio(float(meets(requests, slo, name).sum()), len(requests)) for name in slo.limits
        },
        "token_goodput": ratio(float(requests.output.sum(where=good, dtype=np.int64)), duration),
    }


class HighestRate(NamedTuple):
    """DistServe's goodput."""

    rate: float | None  # requests a second; None: not even the lowest load met it
    is_at_least: bool  # the highest load met it too, so that the truth may lie above


def highest_rate(rates: Sequence[float], attainments: Sequence[float], share: float = ATTAINMENT) -> HighestRate:
    """The highest load at which `share` of the requests is good, from runs at several loads (DistServe, OSDI'24).

    Runs at one rate, such as those of several seeds, are averaged. Between the highest rate that meets it and the next
    one attainment is taken to be linear: 0.95 at 2/s and 0.85 at 4/s are 0.9 at 3/s.
    """
    if not rates:
        return HighestRate(None, is_at_least=False)
    steps, which = np.unique(np.asarray(rates, dtype=np.float64), return_inverse=True)
    means = np.bincount(which, weights=attainments) / np.bincount(which)
    meeting = np.flatnonzero(means >= share)
    if not len(meeting):
        return HighestRate(None, is_at_least=False)
    last = int(meeting[-1])
    if last == len(steps) - 1:
        return HighestRate(float(steps[last]), is_at_least=True)
    part = (means[last] - share) / (means[last] - means[last + 1])
    return HighestRate(float(steps[last] + part * (steps[last + 1] - steps[last])), is_at_least=False)
