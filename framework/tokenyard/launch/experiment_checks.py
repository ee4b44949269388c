"""Ranges of the group `experiment`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenyard.client.endpoint import find_endpoint
from tokenyard.durations import parse_seconds
from tokenyard.launch.convert import wrong

if TYPE_CHECKING:
    from tokenyard.config import ExperimentConfig, SLOConfig


def check_experiment(experiment: ExperimentConfig) -> None:
    """Raise ConfigError on the first value that cannot work."""
    _check_slo(experiment.slo)
    if experiment.target is not None:
        find_endpoint(experiment.target, "experiment.target")
    for client, weight in experiment.client_weights.items():
        if not 0 < weight < math.inf:  # also refuses NaN
            allowed = "a client's share relative to the others', a number above 0"
            raise wrong(f"experiment.client_weights.{client}", weight, allowed)
    if experiment.jobs is not None and experiment.jobs < 1:
        raise wrong("experiment.jobs", experiment.jobs, "at least 1")
    if experiment.dir is not None and (not experiment.dir.strip() or "\0" in experiment.dir):
        raise wrong("experiment.dir", experiment.dir, "the name of a folder")


def _check_slo(slo: SLOConfig) -> None:
    for name, text in (("ttft", slo.ttft), ("tpot", slo.tpot), ("e2e", slo.e2e)):
        if text is not None:
            parse_seconds(text, f"experiment.slo.{name}")
