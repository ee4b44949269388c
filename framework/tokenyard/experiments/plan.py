"""What an experiment is going to run: every combination of the values that its overrides name, checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.descriptors import ExecutorDescriptor
from tokenyard.errors import ConfigError
from tokenyard.experiments.facts import config_hash
from tokenyard.experiments.sinks import check_sinks
from tokenyard.launch.chosen import chosen
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.config_file import read_config_file
from tokenyard.launch.flags import Flagged
from tokenyard.launch.schema import NO_LATENCY, NO_WORKLOAD
from tokenyard.launch.sweep import expand_sweeps, names_several

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenyard.config import EngineConfig, TraceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run."""

    number: int
    overrides: tuple[str, ...]  # all but those that say where and how fast, not what
    varying: tuple[str, ...]  # those that other runs of the experiment have other values for
    config: EngineConfig
    config_hash: str
    is_simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """At least one run. Where files go and how many run at a time is for all as the first one says."""

    runs: tuple[PlannedRun, ...]
    is_multirun: bool

    @property
    def config(self) -> EngineConfig:
        """Of the first run."""
        return self.runs[0].config


def plan_experiment(
    overrides: Sequence[str | Flagged],
    *,
    config_file: Path | None = None,
    is_multirun: bool,
    latency: Sequence[str] = (),
) -> Plan:
    """Raises ConfigError and PluginError for the first run that cannot be made, and for two runs that are the same.

    `latency`: overrides that hold, below all others, where a simulation is to be made and no latency model is named.
    """
    from_file = [] if config_file is None else read_config_file(config_file)
    given = [*(_from_file(one.text, config_file) for one in from_file), *overrides]
    several = next((one for one in given if names_several(one)), None)
    if several is not None and not is_multirun:
        raise ConfigError(f"{several}: names several values, and one run takes one; to make a run of each give -m")
    first, *others = expand_sweeps(given)
    run = _planned(0, *first)
    if latency and run.is_simulated and run.config.latency.name == NO_LATENCY:
        return plan_experiment([*latency, *overrides], config_file=config_file, is_multirun=is_multirun)
    runs = (run, *(_planned(number, *one) for number, one in enumerate(others, start=1)))
    _refuse_twins(runs)
    if len(runs) > 1:
        _refuse_one_trace(runs[0].config.trace)
    return Plan(runs=runs, is_multirun=is_multirun)


def _from_file(text: str, path: Path | None) -> str | Flagged:
    return text if names_several(text) else Flagged(text, f"--config {path}")


def _planned(number: int, overrides: Sequence[str | Flagged], varying: Sequence[str]) -> PlannedRun:
    config, catalogue = load_engine_config(overrides)
    if config.workload.name == NO_WORKLOAD:
        known = ", ".join(catalogue.names("workload"))
        raise ConfigError(f"workload=none: there is nothing to run; choose one with workload=NAME: {known}")
    executor = chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor)
    check_sinks(config.experiment.sinks)
    return PlannedRun(
        number=number,
        overrides=_lasting(one.override if isinstance(one, Flagged) else one for one in overrides),
        varying=tuple(varying),
        config=config,
        config_hash=config_hash(config),
        is_simulated=executor.is_simulated and config.experiment.target is None,
    )


def _lasting(overrides: Iterable[str]) -> tuple[str, ...]:
    return tuple(one for one in overrides if not one.lstrip("+").startswith(("experiment.dir=", "experiment.jobs=")))


def _refuse_twins(runs: Sequence[PlannedRun]) -> None:
    """A run that is made twice says nothing new, and statistics would take it for another sample."""
    seen: dict[str, PlannedRun] = {}
    for run in runs:
        twin = seen.setdefault(run.config_hash, run)
        if twin is not run:
            raise ConfigError(
                f"runs {twin.number} and {run.number} have the same config ({' '.join(run.varying)}); "
                "leave out the values that are named twice"
            )


def _refuse_one_trace(trace: TraceConfig) -> None:
    for key, path in (("trace.path", trace.path), ("trace.chrome", trace.chrome)):
        if path is not None and Path(path).is_absolute():
            raise ConfigError(f"{key}={path}: several runs cannot write one file; give a name, and each has its own")
