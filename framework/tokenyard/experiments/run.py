"""A workload on whatever the config names: a simulation, an engine in this process, or a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.descriptors import ExecutorDescriptor
from tokenyard.experiments.live import run_live
from tokenyard.experiments.remote import run_remote
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.chosen import chosen

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.experiments.records import RunRecord


def run_workload(config: EngineConfig, catalogue: Catalogue, *, keeps_steps: bool = False) -> RunRecord:
    """Run the config's workload to its end: on `experiment.target` where that is given, else on its executor.

    Raises ConfigError, PluginError, ValidationError for a request that cannot be served, ModelLoadError, RemoteError
    for a server that cannot be used.
    """
    if config.experiment.target is not None:
        return run_remote(config, catalogue)
    if chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor).is_simulated:
        return run_simulated(config, catalogue, keeps_steps=keeps_steps)
    return run_live(config, catalogue, keeps_steps=keeps_steps)
