"""The workload that a config names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.descriptors import ComponentDescriptor
from tokenyard.errors import ConfigError
from tokenyard.experiments.clients import with_clients
from tokenyard.interfaces import workload
from tokenyard.interfaces.workload import Workload, WorkloadContext
from tokenyard.launch.chosen import chosen
from tokenyard.launch.schema import NO_WORKLOAD
from tokenyard.parts import make_part

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig


def make_workload(config: EngineConfig, catalogue: Catalogue) -> Workload:
    """Raises ConfigError and PluginError."""
    name, kind = config.workload.name, workload.COMPONENT_KIND
    if name == NO_WORKLOAD:
        known = ", ".join(catalogue.names(kind)) or "none is installed"
        raise ConfigError(f"workload=none: there is nothing to run; choose one with workload=NAME: {known}")
    context = WorkloadContext(seed=config.seed, limit=config.workload.limit)
    made = make_part(
        chosen(catalogue, kind, name, ComponentDescriptor),
        Workload,
        lambda part: part.factory(config.workload.options, context),
    )
    return with_clients(made, config.workload.clients, config.seed)
