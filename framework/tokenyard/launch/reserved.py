"""Keys that are planned and not there yet: refused by name, so that nobody believes they work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

RESERVED_GROUPS = frozenset({"speculative", "structured_outputs"})

COMMAND_GROUPS: Mapping[str, str] = {"bench": "bench.num_requests=32"}
"""Groups whose keys belong to the command of that name and are given on its line alone, with an example."""

ONLY_VALUES: Mapping[str, object] = {
    "model.quantization": None,
}
"""Keys that exist with one value."""


def refuse_group(key: str) -> None:
    """Raise for a key of a group that does not exist yet, or that is a command's own."""
    group = key.partition(".")[0]
    if group in RESERVED_GROUPS:
        raise ConfigError(f"'{key}' is not available in this version; remove it")
    if group in COMMAND_GROUPS:
        raise ConfigError(
            f"'{key}' is no key of the config: `tokenyard {group}` takes keys of its own, on its command line, such as "
            f"{COMMAND_GROUPS[group]}"
        )


def refuse_value(key: str, value: object) -> None:
    """Raise when a reserved key is given another value than the one that can be served."""
    only = ONLY_VALUES[key]
    if type(value) is type(only) and value == only:
        return
    shown, allowed = ("null" if item is None else repr(item) for item in (value, only))
    raise ConfigError(f"{key}: {shown} is not available in this version; the only value is {allowed}")
