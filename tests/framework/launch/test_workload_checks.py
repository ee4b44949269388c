"""Keys that every workload has: what they cannot be is refused at launch."""

from __future__ import annotations

import pytest
from tokenyard.config import WorkloadConfig
from tokenyard.errors import ConfigError
from tokenyard.launch.workload_checks import check_workload


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (WorkloadConfig(limit=0), "workload.limit must be a number of requests, at least 1"),
        (WorkloadConfig(limit=-2), "workload.limit"),
        (WorkloadConfig(limit=2**63), "workload.limit"),
        (WorkloadConfig(time_scale=0.0), "workload.time_scale must be a number above 0"),
        (WorkloadConfig(time_scale=float("nan")), "workload.time_scale"),
        (WorkloadConfig(time_scale=float("inf")), "workload.time_scale"),
        (WorkloadConfig(concurrency=2), "it belongs to closed_loop"),
        (WorkloadConfig(arrivals="closed_loop", concurrency=0), "from 1 to"),
    ],
)
def test_a_value_that_cannot_work_is_refused(config: WorkloadConfig, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_workload(config)
    assert why in str(caught.value)


def test_what_can_work_is_taken() -> None:
    for config in (WorkloadConfig(), WorkloadConfig(limit=1), WorkloadConfig(arrivals="closed_loop", concurrency=1)):
        check_workload(config)
