"""Workloads that a test writes down, and simulations of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tokenyard import ComponentDescriptor
from tokenyard.catalogue import Catalogue
from tokenyard.experiments.records import RunRecord
from tokenyard.experiments.simulation import run_simulated
from tokenyard.interfaces import Workload, WorkloadRequest
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import catalogue_with

STEP = ("latency=constant", "latency.per_step=1.0")
FollowUps = Callable[[WorkloadRequest, float], Sequence[WorkloadRequest]]


class PlannedWorkload(Workload):
    """The requests of a list, and what `follow_ups` makes of their ends."""

    def __init__(self, requests: Sequence[WorkloadRequest], follow_ups: FollowUps, *, has_content: bool) -> None:
        self._requests = requests
        self._follow_ups = follow_ups
        self._has_content = has_content

    def requests(self) -> Iterator[WorkloadRequest]:
        return iter(self._requests)

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        return self._follow_ups(request, end)

    @property
    def has_content(self) -> bool:
        return self._has_content


def planned(
    requests: Sequence[WorkloadRequest],
    follow_ups: FollowUps = lambda request, end: (),
    *,
    has_content: bool = False,
) -> Catalogue:
    """The installed plugins, and `workload=planned`."""
    return catalogue_with(
        ComponentDescriptor(
            component_kind="workload",
            name="planned",
            api_version=(1, 7),
            factory=lambda options, context: PlannedWorkload(requests, follow_ups, has_content=has_content),
        )
    )


def request(arrival: float, prompt: int = 1, output: int = 1, **more: object) -> WorkloadRequest:
    """A request, in short."""
    return WorkloadRequest(arrival=arrival, num_prompt_tokens=prompt, num_output_tokens=output, **more)  # type: ignore[arg-type]


def simulated(
    requests: Sequence[WorkloadRequest],
    *overrides: str,
    follow_ups: FollowUps = lambda request, end: (),
    has_content: bool = False,
) -> RunRecord:
    """A simulation of `requests`; a step takes a second unless the overrides say something else."""
    catalogue = planned(requests, follow_ups, has_content=has_content)
    chosen = () if any(one.startswith("latency") for one in overrides) else STEP
    config, catalogue = load_engine_config(
        ["executor=simulated", "workload=planned", *chosen, *overrides], catalogue=catalogue
    )
    return run_simulated(config, catalogue, keeps_steps=True)
