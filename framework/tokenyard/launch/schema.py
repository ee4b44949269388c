"""Which keys a config has: per group, the core's own dataclass and the options of the chosen components."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tokenyard.config import (
    AttentionConfig,
    EngineConfig,
    ExecutorConfig,
    ExperimentConfig,
    KVCacheConfig,
    LatencyConfig,
    LoopConfig,
    ModelConfig,
    NoOptions,
    PluginsConfig,
    SchedulerConfig,
    ServerConfig,
    TraceConfig,
    WorkloadConfig,
)
from tokenyard.descriptors import SchedulerDescriptor
from tokenyard.errors import ConfigError, PluginError
from tokenyard.interfaces import eviction, predictor

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue, Entry

DEFAULT_SCHEDULER = "batch"
DEFAULT_POLICY = "fcfs"
AUTO_ATTENTION = "auto"
NO_LATENCY = "none"
NO_WORKLOAD = "none"

COMPONENT_GROUPS: Mapping[str, type] = {
    "engine": LoopConfig,
    "scheduler": SchedulerConfig,
    "kv_cache": KVCacheConfig,
    "attention": AttentionConfig,
    "executor": ExecutorConfig,
    "latency": LatencyConfig,
    "workload": WorkloadConfig,
}
PLAIN_GROUPS: Mapping[str, type] = {
    "model": ModelConfig,
    "plugins": PluginsConfig,
    "server": ServerConfig,
    "trace": TraceConfig,
    "experiment": ExperimentConfig,
}
GROUPS: Mapping[str, type] = {**COMPONENT_GROUPS, **PLAIN_GROUPS}
TOP_VALUES = tuple(field.name for field in fields(EngineConfig) if field.name not in GROUPS)
TOP_KEYS = (*GROUPS, *TOP_VALUES)
OPEN_KEYS = ("server.default_chat_template_kwargs", "workload.clients", "experiment.client_weights")
"""Mappings whose keys are the user's."""

COMPONENT_KEYS: Mapping[str, str] = {
    "scheduler.predictor": predictor.COMPONENT_KIND,
    "scheduler.shadow": "policy",
    "kv_cache.eviction": eviction.COMPONENT_KIND,
}
"""Keys whose value is a component's name, or {name: NAME, OPTION: VALUE}, and its kind.

The dataclass has `KEY` for the name and `KEY_options`.
"""

_WITHOUT_PLUGIN: Mapping[str, tuple[str, str]] = {
    "attention": (AUTO_ATTENTION, "takes the first that runs here"),
    "latency": (NO_LATENCY, "says nothing"),
    "workload": (NO_WORKLOAD, "sends nothing"),
}
"""Per group, a choice that no plugin provides, and what it does."""

_BUILT_SEPARATELY = frozenset(
    {"options", "policy", *(f"{key.rpartition('.')[2]}_options" for key in COMPONENT_KEYS)},
)


def core_fields(config_type: type) -> list[str]:
    """The keys of a group that the core itself reads."""
    return [name for name in field_names(config_type) if name not in _BUILT_SEPARATELY]


def field_names(dataclass_type: type) -> list[str]:
    """The names of the fields that a constructor takes."""
    return [field.name for field in fields(dataclass_type) if field.init]


def find_component(catalogue: Catalogue, group: str, name: str) -> Entry | None:
    """The component that a group's option names; None for `attention=auto`, `latency=none`. Raises PluginError."""
    other, meaning = _WITHOUT_PLUGIN.get(group, (None, ""))
    if name == other:
        return None
    if group == "scheduler":
        return catalogue.get_scheduler_or_policy(name)
    try:
        return catalogue.get(group, name)
    except PluginError as error:
        if other is None or not str(error).startswith("unknown"):
            raise
        raise PluginError(f"{error}; '{other}' {meaning}") from error


def component_names(catalogue: Catalogue, group: str) -> list[str]:
    """What a group's generated options are called."""
    names = set(catalogue.names(group))
    if group == "scheduler":
        names.update(catalogue.names("policy"))
    if group in _WITHOUT_PLUGIN:
        names.add(_WITHOUT_PLUGIN[group][0])
    return sorted(names)


def takes_policy(entry: Entry) -> bool:
    """Whether a scheduler is steered by a policy."""
    return isinstance(entry.descriptor, SchedulerDescriptor) and entry.descriptor.takes_policy


class InvalidValueError(ConfigError):
    """A key or value that does not fit; `key` is the full key, so that a caller can say where it came from."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class Chosen:
    """The components that a config names, and so the keys that it may have."""

    components: Mapping[str, Entry | None]  # by group
    policy: Entry | None

    def options_type(self, group: str) -> type:
        entry = self.components[group]
        return NoOptions if entry is None else entry.descriptor.options_type

    @property
    def policy_options_type(self) -> type:
        return NoOptions if self.policy is None else self.policy.descriptor.options_type

    def keys(self) -> Iterator[str]:
        """Every key of the config, dotted."""
        yield from TOP_VALUES
        for group, config_type in GROUPS.items():
            yield from (f"{group}.{name}" for name in core_fields(config_type))
        for group in COMPONENT_GROUPS:
            yield from (f"{group}.{name}" for name in field_names(self.options_type(group)))
        if self.policy is not None:
            yield "scheduler.policy.name"
            yield from (f"scheduler.policy.{name}" for name in field_names(self.policy_options_type))


def find_chosen(values: Mapping[str, object], catalogue: Catalogue) -> Chosen:
    """Look up the components that `values` (a config as plain data) names. Raises ConfigError, PluginError."""
    components: dict[str, Entry | None] = {}
    for group, config_type in COMPONENT_GROUPS.items():
        name = _name_in(group_values(values, group), group, config_type().name)
        components[group] = (
            catalogue.get("scheduler", name) if group == "scheduler" else find_component(catalogue, group, name)
        )
    return Chosen(components, _find_policy(values, catalogue, components["scheduler"]))


def group_values(values: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The mapping under a top-level key or `scheduler.policy`; empty when there is none."""
    found = values.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        group = key.partition(".")[0]
        raise ConfigError(f"{key} must be a mapping of its keys, got {found!r}; choose a component with {group}=NAME")
    return found


def _find_policy(values: Mapping[str, object], catalogue: Catalogue, scheduler: Entry | None) -> Entry | None:
    policy = group_values(values, "scheduler").get("policy")
    if scheduler is None or not takes_policy(scheduler):
        if policy is not None:
            name = scheduler.descriptor.name if scheduler is not None else ""
            raise ConfigError(
                f"scheduler.policy: scheduler '{name}' takes no policy; remove scheduler.policy, "
                "or choose a policy with scheduler=NAME"
            )
        return None
    node = group_values({"scheduler.policy": policy}, "scheduler.policy")
    return catalogue.get("policy", _name_in(node, "scheduler.policy", DEFAULT_POLICY))


def _name_in(node: Mapping[str, object], key: str, default: str) -> str:
    name = node.get("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{key}.name must be the name of a component, got {name!r}")
    return name


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that was most likely meant, looked for over the whole tree."""
    keys = list(known)
    parent, _, leaf = key.rpartition(".")
    elsewhere = [candidate for candidate in keys if candidate.rpartition(".")[2] == leaf]
    if elsewhere:
        return min(elsewhere, key=lambda candidate: (candidate.count("."), candidate))
    siblings = {_leaf(candidate): candidate for candidate in keys if candidate.rpartition(".")[0] == parent}
    everywhere = {_leaf(candidate): candidate for candidate in reversed(keys)}
    for table, word, cutoff in ((siblings, leaf, 0.6), (everywhere, leaf, 0.75), ({k: k for k in keys}, key, 0.75)):
        if matches := difflib.get_close_matches(word, table, n=1, cutoff=cutoff):
            return table[matches[0]]
    return None


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def unknown_key(key: str, known: Iterable[str]) -> InvalidValueError:
    """The error for a key that does not exist: the nearest one, and those beside it."""
    keys = list(known)
    parent = key.rpartition(".")[0]
    beside = sorted(_leaf(candidate) for candidate in keys if candidate.rpartition(".")[0] == parent)
    nearest = nearest_key(key, keys)
    hint = f"; did you mean '{nearest}'?" if nearest else ""
    where = f"keys of {parent}" if parent else "top-level keys"
    allowed = f"; {where}: {', '.join(beside)}" if beside else ""
    return InvalidValueError(key, f"unknown key '{key}'{hint}{allowed}; `tokenyard config` prints all keys")
