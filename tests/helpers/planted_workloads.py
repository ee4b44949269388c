"""Workloads that a test writes down, in a catalogue and a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tokenyard.catalogue import Catalogue, Entry, Provider
from tokenyard.config import EngineConfig, NoOptions
from tokenyard.descriptors import ComponentDescriptor
from tokenyard.interfaces import Workload, WorkloadRequest
from tokenyard.launch.compose import load_engine_config

FollowUps = Callable[[WorkloadRequest, float], Sequence[WorkloadRequest]]


class PlantedWorkload(Workload):
    """Exactly these requests."""

    def __init__(
        self, requests: Sequence[WorkloadRequest], follow_ups: FollowUps | None = None, *, has_content: bool = False
    ) -> None:
        self._requests = requests
        self._follow_ups = follow_ups
        self._has_content = has_content

    def requests(self) -> Iterator[WorkloadRequest]:
        return iter(self._requests)

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        return () if self._follow_ups is None else self._follow_ups(request, end)

    @property
    def has_content(self) -> bool:
        return self._has_content


def planted(workload: Workload, overrides: Sequence[str]) -> tuple[EngineConfig, Catalogue]:
    """The config of the overrides, to run `workload`."""
    config, catalogue = load_engine_config(overrides)
    descriptor: ComponentDescriptor[NoOptions] = ComponentDescriptor(
        component_kind="workload",
        name="planted",
        api_version=(1, 7),
        summary="a test's own",
        factory=lambda options, context: workload,
    )
    provider = Provider(distribution="third-party", version="1", entry_point="third")
    config = replace(config, workload=replace(config.workload, name="planted"))
    return config, Catalogue([*catalogue.entries(), Entry(descriptor=descriptor, provider=provider)])
