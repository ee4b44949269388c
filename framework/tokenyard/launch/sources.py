"""The YAML files of the search path, read through importlib.resources so that zipped packages work too."""

from __future__ import annotations

import importlib.resources
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from tokenyard.catalogue import Catalogue

logger = logging.getLogger(__name__)

CONFIG_MODULE = "tokenyard.configs"
OWN_PATH = f"pkg://{CONFIG_MODULE}"


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of configs: `path` as Hydra takes it, `label` for people."""

    path: str
    label: str

    def file(self, config: str) -> Traversable | None:
        """The YAML file of a config such as `scheduler/fcfs`, or None."""
        root = _root(self.path)
        found = root.joinpath(*f"{config}.yaml".split("/")) if root is not None else None
        return found if found is not None and found.is_file() else None

    @property
    def is_available(self) -> bool:
        root = _root(self.path)
        return root is not None and root.is_dir()


def _root(path: str) -> Traversable | None:
    scheme, separator, rest = path.partition("://")
    if not separator:
        return Path(path)
    if scheme == "file":
        return Path(rest)
    if scheme != "pkg":
        return None
    try:
        return importlib.resources.files(rest.replace("/", ".").rstrip("."))
    except (ImportError, TypeError, ValueError):
        return None


def own_source() -> Source:
    """Our own configs."""
    return Source(OWN_PATH, "configs")


def plugin_sources(catalogue: Catalogue) -> list[Source]:
    """The folders that plugins add; one that cannot be read is left out with a warning."""
    sources: list[Source] = []
    for provider, path in catalogue.config_paths:
        source = Source(path, f"{provider.distribution} {path.partition('://')[2] or path}")
        if source.is_available:
            sources.append(source)
        else:
            logger.warning("%s: its config path %s cannot be read and is left out", provider, path)
    return sources


def read_yaml(file: Traversable) -> object:
    """The content of a config file as plain data, interpolations as they stand."""
    return parse_yaml(file.read_text(encoding="utf-8"))


def parse_yaml(text: str) -> object:
    """YAML as plain data, read as Hydra reads it, interpolations as they stand. Raises ConfigError."""
    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:  # PyYAML's and OmegaConf's errors have no base in common
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from error
