"""Ranges of the group `workload` that hold for every workload."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenyard.launch.convert import wrong

if TYPE_CHECKING:
    from tokenyard.config import WorkloadConfig

MAX_REQUESTS, MAX_CONCURRENCY = 2**53, 2**20


def check_workload(workload: WorkloadConfig) -> None:
    """Raise ConfigError on the first value that cannot work."""
    if workload.limit is not None and not 1 <= workload.limit <= MAX_REQUESTS:
        raise wrong("workload.limit", workload.limit, "a number of requests, at least 1, or null for all of them")
    if not 0 < workload.time_scale < math.inf:  # also refuses NaN
        allowed = "a number above 0 that arrival times are multiplied by"
        raise wrong("workload.time_scale", workload.time_scale, allowed, "; workload.arrivals=all_at_once is no time")
    if workload.concurrency is None:
        return
    if workload.arrivals != "closed_loop":
        allowed = f"null with workload.arrivals={workload.arrivals}"
        raise wrong("workload.concurrency", workload.concurrency, allowed, "; it belongs to closed_loop")
    if not 1 <= workload.concurrency <= MAX_CONCURRENCY:
        allowed = f"a number of requests at a time, from 1 to {MAX_CONCURRENCY}"
        raise wrong("workload.concurrency", workload.concurrency, allowed)
