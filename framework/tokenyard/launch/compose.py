"""Overrides, flags and a config file into a composed config and an EngineConfig.

Composition has two stages, because `plugins.*` decides which plugins are loaded and the loaded plugins decide which
config nodes there are: first the overrides of `plugins` alone, then everything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tokenyard.errors import ConfigError
from tokenyard.launch.build import build_engine_config, build_plugins_config
from tokenyard.launch.config_file import read_config_file
from tokenyard.launch.flags import Flagged
from tokenyard.launch.nodes import explain_missing, generated_nodes, mapping_options
from tokenyard.launch.origins import find_origins
from tokenyard.launch.overrides import Given, ParsedOverride, format_value, located, parse_overrides
from tokenyard.launch.reserved import RESERVED_GROUPS
from tokenyard.launch.schema import (
    COMPONENT_KEYS,
    GROUPS,
    OPEN_KEYS,
    TOP_KEYS,
    InvalidValueError,
    find_chosen,
    group_values,
    unknown_key,
)
from tokenyard.launch.session import HydraSession, hydra_session
from tokenyard.launch.sources import own_source, plugin_sources
from tokenyard.plugins import load_catalogue

if TYPE_CHECKING:
    from pathlib import Path

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, PluginsConfig

_LIKELY_TYPO = 0.8  # similarity of a user's own top-level key to one of ours
_NO_VALUE = object()
_LAYOUT = re.compile(r"^\s*(full_key|object_type|reference_type)\b")


@dataclass(frozen=True, slots=True)
class ComposedConfig:
    """A config that has passed every check: as plain data, where each leaf comes from, and as dataclasses."""

    values: Mapping[str, object]
    origins: Mapping[str, str]
    engine_config: EngineConfig
    catalogue: Catalogue


def compose_config(
    overrides: Sequence[str | Flagged],
    *,
    config_file: Path | None = None,
    catalogue: Catalogue | None = None,
) -> ComposedConfig:
    """Compose our configs with the file's values, then the overrides in their order; of two values the later one holds.

    `catalogue` defaults to the installed plugins as `plugins.*` admits them. Raises ConfigError and PluginError, each
    with one line.
    """
    return _compose(overrides, config_file, catalogue, with_files=True)


def load_engine_config(
    overrides: Sequence[str | Flagged],
    *,
    config_file: Path | None = None,
    catalogue: Catalogue | None = None,
) -> tuple[EngineConfig, Catalogue]:
    """The EngineConfig of `compose_config`, and the catalogue it was checked against."""
    try:
        composed = _compose(overrides, config_file, catalogue, with_files=False)
    except InvalidValueError:  # once more, to name the YAML file that a wrong value is from
        composed = _compose(overrides, config_file, catalogue, with_files=True)
    return composed.engine_config, composed.catalogue


def load_plugins_for(overrides: Sequence[str | Flagged], *, config_file: Path | None = None) -> Catalogue:
    """Only what the overrides' `plugins.*` admit; the rest of the config may be one that cannot be composed."""
    given = [] if config_file is None else read_config_file(config_file)
    parsed = parse_overrides([*given, *(_as_given(override) for override in overrides)])
    return load_catalogue(_plugins_config(parsed))


def engine_config_from(config: DictConfig | Mapping[str, object], catalogue: Catalogue) -> EngineConfig:
    """The EngineConfig of a config that the caller composed, in a Hydra script of his own or as a dict.

    Top-level keys that are not ours are the caller's own and are left alone, except one that is so close to ours that
    it is likely misspelt (`schedular`), and names that are planned for us (`server`, ...): those raise ConfigError.
    Keys left out have their defaults.
    """
    return build_engine_config(_own_part(config), catalogue)


def load_engine_config_from(config: DictConfig | Mapping[str, object]) -> tuple[EngineConfig, Catalogue]:
    """As `engine_config_from`, with the installed plugins as the config's `plugins` admits them."""
    values = _own_part(config)
    catalogue = load_catalogue(build_plugins_config(group_values(values, "plugins")))
    return build_engine_config(values, catalogue), catalogue


def _compose(
    overrides: Sequence[str | Flagged], config_file: Path | None, catalogue: Catalogue | None, *, with_files: bool
) -> ComposedConfig:
    """`with_files` tells the origins of values from YAML files of the search path too, for a third of the time."""
    given = [] if config_file is None else read_config_file(config_file)
    parsed = parse_overrides([*given, *(_as_given(override) for override in overrides)])
    if catalogue is None:
        catalogue = load_catalogue(_plugins_config(parsed))
    own, others = own_source(), plugin_sources(catalogue)
    nodes = generated_nodes(catalogue, lambda path: any(source.file(path) for source in (own, *others)))
    open_keys = (*OPEN_KEYS, *mapping_options(catalogue))
    texts = [_hydra_text(override, open_keys) for override in parsed]
    choices = [override.text for override in parsed if override.is_choice]
    with hydra_session(nodes, [source.path for source in others]) as session:
        try:
            values = _resolved(session.compose(texts))
            contributions = session.contributions(choices) if with_files else []
        except (HydraException, OmegaConfBaseException) as error:
            _explain(error, session, parsed, choices, catalogue)
            raise ConfigError(f"the config cannot be composed: {_one_line(error)}") from error
    origins = find_origins(values, contributions, parsed, (own, *others), catalogue)
    return ComposedConfig(values, origins, _build(values, origins, catalogue), catalogue)


def _as_given(override: str | Flagged) -> Given:
    if isinstance(override, Flagged):
        kind = "flag" if override.flag.startswith("-") else "argument"
        return Given(override.override, f"{kind} {override.flag}")
    return Given(override, f"override {override}")


def _plugins_config(parsed: Sequence[ParsedOverride]) -> PluginsConfig:
    """First stage: what the overrides say about plugins."""
    values = {
        override.key.partition(".")[2]: override.value for override in parsed if override.key.startswith("plugins.")
    }
    return build_plugins_config(values)


def _hydra_text(override: ParsedOverride, open_keys: Sequence[str]) -> str:
    """The keys of mappings are not in the tree; the checks at the end judge them."""
    is_open = any(override.key == key or override.key.startswith(f"{key}.") for key in open_keys)
    if is_open and not override.text.startswith("+"):
        return f"++{override.text}"
    return override.text


def _resolved(config: DictConfig) -> dict[str, object]:
    return cast("dict[str, object]", OmegaConf.to_container(config, resolve=True))


def _build(values: Mapping[str, object], origins: Mapping[str, str], catalogue: Catalogue) -> EngineConfig:
    try:
        return build_engine_config(values, catalogue)
    except InvalidValueError as error:
        raise InvalidValueError(error.key, f"{error}{located(origins.get(error.key, ''))}") from error


def _explain(
    error: Exception,
    session: HydraSession,
    parsed: Sequence[ParsedOverride],
    choices: Sequence[str],
    catalogue: Catalogue,
) -> None:
    """Raise something better than Hydra's message where the cause can be found."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        explain_missing(catalogue, error.missing_cfg_file)
    if isinstance(error, MissingConfigException | OmegaConfBaseException):
        return  # a file that a plugin's file names, or an interpolation: the message says it
    try:
        base = _resolved(session.compose(choices))
    except (HydraException, OmegaConfBaseException):
        return
    known = list(dict.fromkeys(find_chosen(base, catalogue).keys()))
    for override in parsed:
        if override.is_choice:
            continue
        if override.key.startswith("scheduler.policy") and "policy" not in group_values(base, "scheduler"):
            name = group_values(base, "scheduler").get("name")
            raise ConfigError(f"{override.key}: scheduler '{name}' takes no policy; remove it, or choose a policy")
        if (parent := override.key.rpartition(".")[0]) in COMPONENT_KEYS:
            option = override.key.rpartition(".")[2]
            raise ConfigError(
                f"{override.key}: options stand beside the name; write {parent}={{name: NAME, {option}: ...}}"
            )
        current = _value_at(base, override.key)
        if current is _NO_VALUE:
            raise unknown_key(override.key, known) from error
        if isinstance(current, Mapping | list) and isinstance(override.value, Mapping | list):
            _refuse_other_container(override, current)
        if override.text.startswith("+") and not override.text.startswith("++"):
            raise ConfigError(f"cannot apply {override.text!r}: the key exists; write it without '+'") from error


def _value_at(values: Mapping[str, object], key: str) -> object:
    """What the tree has there; `_NO_VALUE` = nothing."""
    node: object = values
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _NO_VALUE
        node = node[part]
    return node


def _refuse_other_container(override: ParsedOverride, current: object) -> None:
    """A list where a mapping stands, or the other way round, which OmegaConf cannot merge."""
    if isinstance(current, Mapping) != isinstance(override.value, Mapping):
        wanted = "a mapping, such as {name: 2}" if isinstance(current, Mapping) else "a list, such as [a, b]"
        message = f"{override.key} must be {wanted}, got {format_value(override.value)}{located(override.origin)}"
        raise InvalidValueError(override.key, message)


def _one_line(error: BaseException) -> str:
    """The message of Hydra's or OmegaConf's error and of its cause, without their layout."""
    texts = [str(item) for item in (error, error.__cause__) if item is not None]
    lines = [line.strip() for text in texts for line in text.splitlines() if not _LAYOUT.match(line)]
    key = error.full_key if isinstance(error, OmegaConfBaseException) else None
    return (f"{key}: " if key else "") + "; ".join(line for line in lines if line)


def _own_part(config: DictConfig | Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in config:
        key = str(name)
        if key in TOP_KEYS or key in RESERVED_GROUPS:
            values[key] = _plain_item(config, key)
            if values[key] is None and key in GROUPS:
                raise ConfigError(f"{key} must be a mapping, got null; leave it out for its defaults")
        elif key.partition(".")[0] in TOP_KEYS:
            raise ConfigError(f"the key '{key}' has a dot; nest it: {{'{key.partition('.')[0]}': {{...}}}}")
        elif matches := difflib.get_close_matches(key.lower(), TOP_KEYS, n=1, cutoff=_LIKELY_TYPO):
            raise ConfigError(
                f"unknown top-level key '{key}'; did you mean '{matches[0]}'? rename it if it is your own; "
                f"top-level keys: {', '.join(TOP_KEYS)}"
            )
    return values


def _plain_item(config: DictConfig | Mapping[str, object], key: str) -> object:
    """One top-level item, resolved in the context of the whole config."""
    try:
        whole = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
        if OmegaConf.is_missing(whole, key):
            raise ConfigError(f"{key} has no value; set {key}=...")
        item = whole[key]
        return OmegaConf.to_container(item, resolve=True) if OmegaConf.is_config(item) else item
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {_one_line(error)}") from error
