"""The composed config of a run in its folder, where Hydra would leave it: `.hydra/config.yaml`, `overrides.yaml`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, UserError
from tokenyard.experiments.facts import config_values
from tokenyard.experiments.run_folder import HYDRA
from tokenyard.launch.build import build_engine_config, build_plugins_config
from tokenyard.launch.schema import group_values
from tokenyard.launch.sources import parse_yaml
from tokenyard.plugins import load_catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig

CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"

_NO_TEXT = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


def write_config(folder: Path, config: EngineConfig, overrides: Sequence[str]) -> None:
    """Both files, with every value, defaults included. Raises ConfigError for an option that is no plain data."""
    values = config_values(config)
    place = folder / HYDRA
    place.mkdir(parents=True, exist_ok=True)
    (place / CONFIG).write_text("".join(f"{line}\n" for line in _yaml(values)), encoding="utf-8")
    (place / OVERRIDES).write_text("".join(f"- {json.dumps(one)}\n" for one in overrides) or "[]\n", encoding="utf-8")


def read_config(folder: Path) -> tuple[EngineConfig, Catalogue]:
    """The config that `write_config` wrote, exactly, with the plugins that it admits. Raises UserError."""
    values = _read(folder / HYDRA / CONFIG)
    if not isinstance(values, dict):
        raise UserError(f"{folder / HYDRA / CONFIG}: is no config")
    catalogue = load_catalogue(build_plugins_config(group_values(values, "plugins")))
    return build_engine_config(values, catalogue), catalogue


def read_overrides(folder: Path) -> list[str]:
    """What the run was started with. Raises UserError."""
    values = _read(folder / HYDRA / OVERRIDES)
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise UserError(f"{folder / HYDRA / OVERRIDES}: is no list of overrides")
    return values


def _read(path: Path) -> object:
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _yaml(values: Mapping[str, object], depth: int = 0) -> Iterator[str]:
    """JSON's scalars and lists are YAML too, and quote what needs quoting."""
    for name, value in values.items():
        key = f"{'  ' * depth}{name if _is_plain(name) else json.dumps(name)}:"
        if isinstance(value, dict) and value:
            yield key
            yield from _yaml(value, depth + 1)
        else:
            yield f"{key} {_scalar(value)}"


def _is_plain(name: str) -> bool:
    """Whether YAML takes it for a text as it is."""
    return name.isascii() and name.isidentifier() and name.lower() not in _NO_TEXT


def _scalar(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value, ensure_ascii=False)
