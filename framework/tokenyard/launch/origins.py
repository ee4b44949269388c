"""Where each value of a composed config comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.launch.nodes import NODE_GROUP, is_option_of_component
from tokenyard.launch.schema import COMPONENT_GROUPS
from tokenyard.launch.sources import Source, read_yaml

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.launch.overrides import ParsedOverride

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Contribution:
    """One config that was merged: its path (`scheduler/fcfs`) and the package, the place in the tree, it went to."""

    path: str
    package: str


def leaves(value: object, prefix: str = "") -> Iterator[str]:
    """The dotted keys of everything that is not a mapping; an empty mapping counts as a leaf."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix


def find_origins(
    values: Mapping[str, object],
    contributions: Sequence[Contribution],
    overrides: Sequence[ParsedOverride],
    sources: Sequence[Source],
    catalogue: Catalogue,
) -> dict[str, str]:
    """For each leaf of `values`: `default`, `plugin DISTRIBUTION (default)`, a config file, or what overrode it."""
    found: dict[str, str] = {}
    for contribution in contributions:
        found.update(_from_files(contribution, sources))
    for override in overrides:
        found.update(_from_choice(override, values) if override.is_choice else _from_value(override))
    keys = list(leaves(values))
    return {key: found.get(key) or _ancestor(key, found) or _default_of(key, values, catalogue) for key in keys}


def _from_files(contribution: Contribution, sources: Sequence[Source]) -> dict[str, str]:
    for source in sources:
        file = source.file(contribution.path)
        if file is None:
            continue
        content = read_yaml(file)
        if not isinstance(content, Mapping):
            return {}
        own = {name: item for name, item in content.items() if name != "defaults"}
        if not own:
            return {}
        return dict.fromkeys(leaves(own, contribution.package), f"{source.label}/{contribution.path}.yaml")
    return {}


def _from_value(override: ParsedOverride) -> dict[str, str]:
    return dict.fromkeys([override.key, *leaves(override.value, override.key)], override.origin)


def _from_choice(override: ParsedOverride, values: Mapping[str, object]) -> dict[str, str]:
    """A choice sets the name of the component, unless it is the name of a file that sets it."""
    node = values.get(override.key)
    found: dict[str, str] = {}
    if override.key in COMPONENT_GROUPS and isinstance(node, Mapping):
        policy = node.get("policy")
        if isinstance(policy, Mapping) and policy.get("name") == override.value:
            found[f"{override.key}.policy.name"] = override.origin
        elif node.get("name") == override.value:
            found[f"{override.key}.name"] = override.origin
    return found


def _ancestor(key: str, found: Mapping[str, str]) -> str | None:
    """A whole mapping may have been given at once."""
    while "." in key:
        key = key.rpartition(".")[0]
        if key in found:
            return found[key]
    return None


def _default_of(key: str, values: Mapping[str, object], catalogue: Catalogue) -> str:
    """A dataclass's own default: the core's, or that of the component which the config names."""
    group, _, rest = key.partition(".")
    if not is_option_of_component(f"{NODE_GROUP}/{group}/", rest):
        return DEFAULT
    kind, node = (group, values.get(group))
    if rest.startswith("policy.") and isinstance(node, Mapping):
        kind, node = "policy", node.get("policy")
    name = node.get("name") if isinstance(node, Mapping) else None
    for entry in catalogue.entries():
        if entry.kind == kind and entry.name == name and not entry.provider.is_builtin:
            return f"plugin {entry.provider.distribution} ({DEFAULT})"
    return DEFAULT
