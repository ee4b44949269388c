"""`--config FILE`: a YAML of overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError
from tokenyard.launch.overrides import Given, format_value
from tokenyard.launch.schema import COMPONENT_GROUPS, COMPONENT_KEYS
from tokenyard.launch.sources import parse_yaml

if TYPE_CHECKING:
    from pathlib import Path

_MOST_SHOWN = 200  # characters of what is wrong with a file, which may be any file


def read_config_file(path: Path) -> list[Given]:
    """The overrides in a file.

    The file is a mapping shaped like the config, as `tokenyard config` prints it: `scheduler: {max_num_seqs: 8}`.
    Dotted keys (`scheduler.max_num_seqs: 8`) and the choice of a component (`scheduler: fcfs`) work too. Or it is a
    list of overrides as on the command line. Raises ConfigError when it cannot be read.
    """
    content = _load(path)
    origin = f"file {path}"
    if isinstance(content, list):
        return [Given(_as_text(item, path), origin) for item in content]
    if not isinstance(content, Mapping):
        raise ConfigError(
            f"--config {path}: expected a mapping of config keys or a list of overrides, got {repr(content)[:80]}"
        )
    return [Given(text, origin) for text in _overrides(content, path)]


def _load(path: Path) -> object:
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {str(error)[:_MOST_SHOWN]}") from error


def _as_text(item: object, path: Path) -> str:
    if not isinstance(item, str):
        raise ConfigError(f"--config {path}: expected an override such as scheduler.max_num_seqs=8, got {item!r}")
    return item


def _overrides(content: Mapping[object, object], path: Path) -> Iterator[str]:
    """Choices first: the values after them belong to what was chosen."""
    choices: list[str] = []
    values: list[str] = []
    for name, value in content.items():
        key = _key(name, path)
        choice = _choice(key, value)
        if choice is not None:
            choices.append(f"{key}={choice}")
        if choice is None or isinstance(value, Mapping):
            values.extend(_leaves(key, value, path))
    yield from choices
    yield from values


def _key(name: object, path: Path) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"--config {path}: {name!r} is not a config key")
    if "-" in name:
        raise ConfigError(
            f"--config {path}: '{name}' is a flag's name, not a config key; `tokenyard config` prints the keys"
        )
    return name


def _choice(key: str, value: object) -> str | None:
    """The option of a component group that an entry chooses."""
    if key not in COMPONENT_GROUPS:
        return None
    name = value
    if isinstance(value, Mapping):
        policy = value.get("policy")
        name = policy.get("name") if isinstance(policy, Mapping) else None
        name = value.get("name") if name is None else name
        if name is None:
            return None
    return format_value(name)


def _leaves(key: str, value: object, path: Path) -> Iterator[str]:
    """Added by force: whether a key exists is checked for the whole config at the end, with better words."""
    if isinstance(value, Mapping) and value and key not in COMPONENT_KEYS:
        for name, item in value.items():
            yield from _leaves(f"{key}.{_key(name, path)}", item, path)
    else:
        yield f"++{key}={format_value(value)}"
