"""Facts of a run: what one has to know to make it again, and to tell one run from another."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.descriptors import PLUGIN_API
from tokenyard.errors import ConfigError, PluginError, TokenyardError
from tokenyard.experiments.workloads import make_workload
from tokenyard.interfaces import logits_processor, workload
from tokenyard.ipc.config_values import config_to_values
from tokenyard.ipc.handshake import own_identity
from tokenyard.launch.schema import NO_LATENCY, NO_WORKLOAD
from tokenyard.launch.steering import make_latency_model
from tokenyard.launch.tracing import components_of

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.latency import LatencyModel
    from tokenyard.interfaces.workload import Workload

_PACKAGE = Path(__file__).resolve().parent.parent
_GIT_SECONDS = 10

UNHASHED = ("trace", "server", "experiment.dir", "experiment.jobs", "experiment.sinks")
"""Groups and keys that no result depends on: where files go, how many runs there are at a time, the HTTP server."""


def run_facts(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    workload_used: Workload | None = None,
    latency_used: LatencyModel | None = None,
) -> dict[str, object]:
    """JSON-ready, and the same for the same run: no time of day is in it.

    The parts that were used tell of themselves; where they are not given they are made once more to be asked. Raises
    ConfigError and PluginError as making them does.
    """
    return {
        "config_hash": config_hash(config),
        "tokenyard": own_identity().tokenyard_version,
        "plugin_api": ".".join(map(str, PLUGIN_API)),
        "commit": commit(),
        "components": _components(config, catalogue),
        "engine": config.engine.name,
        "executor": config.executor.name,
        "target": config.experiment.target,
        "seed": config.seed,
        "workload": {
            "name": config.workload.name,
            "description": _workload_description(config, catalogue, workload_used),
        },
        "latency": {"name": config.latency.name, "calibration": _calibration(config, catalogue, latency_used)},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": machine(),
    }


def config_values(config: EngineConfig) -> dict[str, object]:
    """Every value of a config as plain data, defaults included. Raises ConfigError for an option that is no such."""
    try:
        return config_to_values(config)
    except TypeError as error:
        raise ConfigError(f"this config cannot be written down: {error}") from error


def config_hash(config: EngineConfig) -> str:
    """SHA-256, hexadecimal, of the config's values as JSON with sorted keys and no spaces, UNHASHED left out.

    Defaults are values too: a version of Tokenyard or a plugin with another default gives another hash.
    """
    values = {key: value for key, value in config_values(config).items() if key not in UNHASHED}
    for key in UNHASHED:
        group, _, name = key.partition(".")
        node = values.get(group)
        if name and isinstance(node, Mapping):
            values[group] = {item: value for item, value in node.items() if item != name}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@functools.cache
def commit() -> str | None:
    """Of the checkout that this package runs from, with `-dirty` behind it where files of it were changed."""
    root = next((folder for folder in _PACKAGE.parents[:3] if (folder / ".git").exists()), None)
    git = shutil.which("git")
    if root is None or git is None:
        return None
    command = [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # others may work in the checkout
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def machine() -> dict[str, object]:
    """What this machine is; its name is nobody's business."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
    }


def _components(config: EngineConfig, catalogue: Catalogue) -> list[dict[str, str]]:
    """Everything that was chosen, with who provides it."""
    found = [(one.kind, one.name, one.distribution, one.version) for one in components_of(config, catalogue)]
    named = [("executor", config.executor.name), *(("observer", one.name) for one in config.observers)]
    named += [(logits_processor.COMPONENT_KIND, one.name) for one in config.logits_processors]
    if config.workload.name != NO_WORKLOAD:
        named.append((workload.COMPONENT_KIND, config.workload.name))
    for kind, name in named:
        provider = catalogue.get(kind, name).provider
        found.append((kind, name, provider.distribution, provider.version))
    keys = ("kind", "name", "distribution", "version")
    return [dict(zip(keys, one, strict=True)) for one in found]


def _workload_description(config: EngineConfig, catalogue: Catalogue, used: Workload | None) -> str:
    if used is None and config.workload.name == NO_WORKLOAD:
        return ""
    told = used or make_workload(config, catalogue)
    return _line("workload", config.workload.name, lambda: told.description)


def _calibration(config: EngineConfig, catalogue: Catalogue, used: LatencyModel | None) -> str:
    if used is None and config.latency.name == NO_LATENCY:
        return ""
    model = used or make_latency_model(config, catalogue)
    return "" if model is None else _line("latency model", config.latency.name, lambda: model.calibration)


def _line(kind: str, name: str, ask: Callable[[], str]) -> str:
    """What a plugin says of itself."""
    try:
        line = ask()
    except TokenyardError:
        raise
    except Exception as error:
        raise PluginError(f"{kind} '{name}' cannot say what it is: {type(error).__name__}: {error}") from error
    if not isinstance(line, str):
        raise PluginError(f"{kind} '{name}' says that it is {line!r}; that must be a line of text, or ''")
    return line
