"""A component by name with its options, where a key's value chooses it: `NAME`, or `{name: NAME, OPTION: VALUE}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tokenyard.config import NO_OPTIONS
from tokenyard.errors import PluginError
from tokenyard.launch.convert import to_dataclass, wrong
from tokenyard.launch.nodes import defaults_of
from tokenyard.launch.schema import COMPONENT_KEYS, group_values

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue


def named_component(item: object, key: str, kind: str, catalogue: Catalogue) -> tuple[str, object]:
    """Name and typed options of what `item` chooses; raises ConfigError and PluginError."""
    data = {"name": item} if isinstance(item, str) else item
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise wrong(key, item, "a name, or a mapping with a name and options: {name: NAME, OPTION: VALUE}")
    entry = catalogue.get(kind, data["name"])
    options = {name: value for name, value in data.items() if name != "name"}
    return entry.name, to_dataclass(entry.descriptor.options_type, options, key)


def component_keys(
    config_type: type, group: str, values: Mapping[str, object], catalogue: Catalogue
) -> dict[str, object]:
    """The fields of a group's dataclass that `COMPONENT_KEYS` fill: `NAME` and `NAME_options`."""
    data = group_values(values, group)
    fields: dict[str, object] = {}
    for key, kind in COMPONENT_KEYS.items():
        if key.partition(".")[0] != group:
            continue
        leaf = key.partition(".")[2]
        default = defaults_of(config_type, [leaf])[leaf]
        fields[leaf], fields[f"{leaf}_options"] = _choice(data.get(leaf, default), default, key, kind, catalogue)
    return fields


def _choice(item: object, default: object, key: str, kind: str, catalogue: Catalogue) -> tuple[str | None, object]:
    if item is None and default is None:
        return None, NO_OPTIONS
    if isinstance(item, str) and item == default and item not in catalogue.names(kind):
        return item, NO_OPTIONS  # looked for when somebody needs it: nearly always nobody does
    try:
        return named_component(item, key, kind, catalogue)
    except PluginError as error:
        raise type(error)(f"{key}: {error}") from error
