"""The config nodes that are generated: defaults of the dataclasses, so that no YAML file repeats them.

Each component has a node `tokenyard/GROUP/NAME` with all its values; `/tokenyard/model`, `/tokenyard/plugins` and
`/tokenyard/top` hold the rest. The YAML files build on these. A component without a YAML file of its name also has the
node `GROUP/NAME`, so that `GROUP=NAME` works for every installed plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, cast

from tokenyard.config import EngineConfig, PolicyConfig
from tokenyard.errors import ConfigError, PluginError
from tokenyard.launch.convert import may_be_mapping, type_hints
from tokenyard.launch.schema import (
    COMPONENT_GROUPS,
    DEFAULT_POLICY,
    DEFAULT_SCHEDULER,
    GROUPS,
    PLAIN_GROUPS,
    TOP_VALUES,
    component_names,
    core_fields,
    field_names,
    find_component,
    takes_policy,
)

if TYPE_CHECKING:
    from hydra.core.config_store import ConfigStore

    from tokenyard.catalogue import Catalogue, Entry

NODE_GROUP = "tokenyard"
PROVIDER = "tokenyard generated"  # marks our nodes in Hydra's ConfigStore
MISSING_VALUE = "???"  # Hydra's mark of a value that must be given

PlainNode = dict[str, object]


@dataclass(frozen=True, slots=True)
class Node:
    """A generated node: `path` is its place among the configs, such as `tokenyard/scheduler/fcfs`."""

    path: str
    values: PlainNode


def plain(value: object) -> object:
    """A default as data that YAML can hold."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)  # a Path, for instance


def default_of(field: Field[object]) -> object:
    """The default of a dataclass field as plain data; MISSING_VALUE where there is none."""
    if field.default is not MISSING:
        return plain(field.default)
    if field.default_factory is not MISSING:
        return plain(field.default_factory())
    return MISSING_VALUE


def defaults_of(dataclass_type: type, names: list[str] | None = None) -> PlainNode:
    """The defaults of a dataclass's fields, all or the named ones."""
    wanted = field_names(dataclass_type) if names is None else names
    return {field.name: default_of(field) for field in fields(dataclass_type) if field.name in wanted}


def options_node(entry: Entry, key: str, taken: list[str]) -> PlainNode:
    """The defaults of a component's options. Raises PluginError when they cannot stand under `key`."""
    options_type = entry.descriptor.options_type
    clash = sorted({*field_names(options_type)} & {*taken})
    if clash:
        raise PluginError(
            f"{entry.provider}: its option '{clash[0]}' has the name of the core's own key {key}.{clash[0]}; "
            "the plugin must rename it"
        )
    try:
        return defaults_of(options_type)
    except Exception as error:  # a default_factory is the plugin's own code
        raise PluginError(f"{entry.provider}: the defaults of its options failed: {error!r}") from error


def component_node(catalogue: Catalogue, group: str, name: str) -> PlainNode:
    """All values of a group when `name` is chosen in it. Raises PluginError."""
    entry = find_component(catalogue, group, name)
    if group == "scheduler" and entry is not None:
        return _scheduler_node(catalogue, entry)
    config_type = COMPONENT_GROUPS[group]
    core = core_fields(config_type)
    options = {} if entry is None else options_node(entry, group, field_names(config_type))
    return {**defaults_of(config_type, core), **options, "name": name}


def _scheduler_node(catalogue: Catalogue, entry: Entry) -> PlainNode:
    is_policy = entry.descriptor.kind == "policy"
    scheduler = catalogue.get("scheduler", DEFAULT_SCHEDULER) if is_policy else entry
    config_type = COMPONENT_GROUPS["scheduler"]
    core = core_fields(config_type)
    node = {
        **defaults_of(config_type, core),
        **options_node(scheduler, "scheduler", field_names(config_type)),
        "name": scheduler.descriptor.name,
    }
    if takes_policy(scheduler):
        policy = entry if is_policy else catalogue.get("policy", DEFAULT_POLICY)
        options = options_node(policy, "scheduler.policy", field_names(PolicyConfig))
        node["policy"] = {"name": policy.descriptor.name, **options}
    return node


def core_nodes() -> list[Node]:
    """The nodes that need no plugin."""
    top = Node(f"{NODE_GROUP}/top", defaults_of(EngineConfig, list(TOP_VALUES)))
    groups = [Node(f"{NODE_GROUP}/{name}", defaults_of(type_)) for name, type_ in PLAIN_GROUPS.items()]
    return [top, *groups]


def mapping_options(catalogue: Catalogue) -> list[str]:
    """Keys of components' options that may be mappings: what these hold is not in the tree of defaults.

    What a mapping is keyed by is for the user to name; of a number or a mapping, the default may be the number.
    """
    keys: set[str] = set()
    for group in COMPONENT_GROUPS:
        for name in component_names(catalogue, group):
            with suppress(PluginError, ConfigError):  # explained when it is chosen
                keys.update(_mappings_of(group, find_component(catalogue, group, name)))
    return sorted(keys)


def _mappings_of(group: str, entry: Entry | None) -> Iterator[str]:
    if entry is not None:
        prefix = "scheduler.policy" if entry.descriptor.kind == "policy" else group
        options_type: type = entry.descriptor.options_type
        for name, annotation in type_hints(options_type).items():
            if may_be_mapping(annotation):
                yield f"{prefix}.{name}"


def generated_nodes(catalogue: Catalogue, has_file: Callable[[str], bool]) -> list[Node]:
    """All nodes. `has_file` says of a path such as `scheduler/fcfs` whether a YAML file serves it.

    A component that cannot be described (in conflict, of a clashing option) has no node: choosing it fails, and
    `explain_missing` has the reason.
    """
    nodes = core_nodes()
    for group in COMPONENT_GROUPS:
        for name in component_names(catalogue, group):
            try:
                values = component_node(catalogue, group, name)
            except (PluginError, ConfigError):
                continue
            nodes.append(Node(f"{NODE_GROUP}/{group}/{name}", values))
            if not has_file(f"{group}/{name}"):
                nodes.append(Node(f"{group}/{name}", values))
    return nodes


def explain_missing(catalogue: Catalogue, path: str) -> None:
    """Raise the reason why a node (`scheduler/x` or `tokenyard/scheduler/x`) does not exist, if it is ours."""
    group, _, name = path.removeprefix(f"{NODE_GROUP}/").partition("/")
    if group in COMPONENT_GROUPS:
        component_node(catalogue, group, name)
    elif group in GROUPS:
        raise ConfigError(
            f"{group}={name}: there is no file {group}/{name}.yaml among the configs; "
            f"values are set with {group}.KEY=VALUE, such as {group}.{field_names(GROUPS[group])[0]}=..."
        )


def is_option_of_component(node_path: str, key: str) -> bool:
    """Whether a key of a generated node (relative to its group) is a component's option, not the core's own."""
    group = node_path.removeprefix(f"{NODE_GROUP}/").partition("/")[0]
    if group not in COMPONENT_GROUPS:
        return False
    head, _, rest = key.partition(".")
    return rest != "name" if head == "policy" else head not in core_fields(COMPONENT_GROUPS[group])


def store_nodes(store: ConfigStore, nodes: list[Node]) -> None:
    """Put nodes into Hydra's ConfigStore in place of those of an earlier call; a user's own of the same path stay."""
    _remove_own(store.repo)
    for node in nodes:
        group, _, name = node.path.rpartition("/")
        existing = store.repo
        for part in group.split("/"):
            existing = existing.get(part, {})
        if f"{name}.yaml" not in existing:
            store.store(group=group, name=name, node=node.values, provider=PROVIDER)


def _remove_own(repo: dict[str, object]) -> None:
    from hydra.core.config_store import ConfigNode

    for key, value in list(repo.items()):
        if isinstance(value, dict):
            _remove_own(cast("dict[str, object]", value))
            if not value:
                del repo[key]
        elif isinstance(value, ConfigNode) and value.provider == PROVIDER:
            del repo[key]
