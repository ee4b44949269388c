"""simulate: a workload in virtual time, from Python."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from tokenyard.config import NO_OPTIONS
from tokenyard.descriptors import ExecutorDescriptor
from tokenyard.errors import UserError
from tokenyard.experiments.facts import run_facts
from tokenyard.experiments.judging import judged
from tokenyard.experiments.records import REQUEST_COLUMNS, STEP_COLUMNS, RunRecord
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.chosen import chosen
from tokenyard.launch.compose import load_engine_config, load_engine_config_from
from tokenyard.launch.schema import NO_LATENCY
from tokenyard.launch.steering import make_latency_model

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from omegaconf import DictConfig

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig

logger = logging.getLogger(__name__)

SIMULATED = "executor=simulated"
DEFAULT_LATENCY = ("latency=linear", "latency.per_step=0.02", "latency.per_token=7e-5")
"""What a simulation takes, and says so, where no latency model is named: an idea can be tried at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a simulation came to. N = requests, in order of arrival; S = steps. Times in seconds."""

    metrics: Mapping[str, object]  # ready for JSON; docs/reference/metrics-of-experiments.md defines them
    facts: Mapping[str, object]  # what makes the run repeatable: config hash, versions, loop, seed, commit
    record: RunRecord

    @property
    def requests(self) -> dict[str, NDArray[np.generic]]:
        """[N] by name: the columns of `tokenyard simulate --requests`; a time that never came is NaN."""
        table = self.record.requests
        names = np.array([*table.clients, ""], dtype=np.object_)  # -1, nobody, is the last one
        columns = {name: getattr(table, name) for name in REQUEST_COLUMNS if name != "client"}
        return {name: names[table.client] if name == "client" else columns[name] for name in REQUEST_COLUMNS}

    @property
    def steps(self) -> dict[str, NDArray[np.generic]] | None:
        """[S] by name: the columns of `tokenyard simulate --steps`; None where they were not kept."""
        table = self.record.steps
        if table is None:
            return None
        columns = {name: getattr(table, name) for name in STEP_COLUMNS if name != "step"}
        return {"step": np.arange(len(table)), **columns}


def simulate(
    config: DictConfig | Mapping[str, object] | Sequence[str] = (), *, keep_steps: bool = True
) -> SimulationResult:
    """Run the workload of a config on its scheduler, policy and K/V manager, in virtual time and without a model.

    `config`: a list of overrides, or a composed Hydra config (a `@hydra.main` script's own), whose executor is replaced
    by `simulated`: the same config runs live. It needs a workload. `keep_steps=False` saves memory in long runs.
    Without a latency model a step takes 20 ms and 70 us a token, and a warning says so. Raises ConfigError
    and PluginError, and ValidationError for a request that cannot be served.
    """
    if isinstance(config, str):
        raise UserError(f"simulate takes a list of overrides, got the text {config!r}; write ['{config}']")
    if isinstance(config, list | tuple):
        return simulated(*load_engine_config([SIMULATED, *config]), keep_steps=keep_steps)
    if not isinstance(config, Mapping) and not hasattr(config, "items"):
        raise UserError(f"simulate takes a config, a dict or a list of overrides; got {config!r}")
    engine_config, catalogue = load_engine_config_from(cast("DictConfig | Mapping[str, object]", config))
    return simulated(_without_model(engine_config, catalogue), catalogue, keep_steps=keep_steps)


def simulated(config: EngineConfig, catalogue: Catalogue, *, keep_steps: bool) -> SimulationResult:
    """The same from a config that was converted and checked already."""
    config = _with_latency(config)
    latency = make_latency_model(config, catalogue)
    # First: a plugin that cannot say what it is should not cost a run.
    facts = run_facts(config, catalogue, latency_used=latency)
    record = run_simulated(config, catalogue, keeps_steps=keep_steps)
    return SimulationResult(metrics=judged(record, config, latency), facts=facts, record=record)


def _without_model(config: EngineConfig, catalogue: Catalogue) -> EngineConfig:
    if chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor).is_simulated:
        return config
    return replace(config, executor=replace(config.executor, name="simulated", options=NO_OPTIONS))


def _with_latency(config: EngineConfig) -> EngineConfig:
    if config.latency.name != NO_LATENCY:
        return config
    logger.warning("no latency model is named; a step takes as long as %s says", " ".join(DEFAULT_LATENCY))
    return replace(config, latency=load_engine_config(DEFAULT_LATENCY)[0].latency)
