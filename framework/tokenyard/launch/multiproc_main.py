"""The program of a worker process of `executor=multiproc`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenyard.executor.multiproc_worker import run_rank
from tokenyard.launch.build import build_engine_config, build_plugins_config
from tokenyard.launch.schema import group_values
from tokenyard.plugins import load_catalogue

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig


def main() -> None:
    """Until the executor ends it."""
    run_rank(_config_of)


def _config_of(values: Mapping[str, object]) -> tuple[EngineConfig, Catalogue]:
    """Plugins are loaded here, by this process for itself."""
    catalogue = load_catalogue(build_plugins_config(group_values(values, "plugins")))
    return build_engine_config(values, catalogue), catalogue
