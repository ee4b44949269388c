"""Workloads of the installed plugins, made without composing a config, which takes a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import OmegaConf
from tokenyard.interfaces import Workload, WorkloadContext, WorkloadRequest
from tokenyard.launch.convert import to_dataclass
from tokenyard.plugins import load_catalogue


def workload(name: str, *overrides: str, seed: int = 0) -> Workload:
    """As `workload=NAME workload.OVERRIDE ...` makes it."""
    part = load_catalogue().get("workload", name).descriptor
    options = to_dataclass(part.options_type, given_options(overrides), "workload")
    made = part.factory(options, WorkloadContext(seed=seed, limit=None))  # type: ignore[attr-defined]
    assert isinstance(made, Workload)
    return made


def given_options(overrides: Sequence[str]) -> Mapping[str, object]:
    values = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def requests(name: str, *overrides: str, seed: int = 0) -> list[WorkloadRequest]:
    return list(workload(name, *overrides, seed=seed).requests())
