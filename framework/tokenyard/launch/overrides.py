"""Overrides as text: parsing with an error that says how to write it, and quoting so that any text works verbatim."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from tokenyard.errors import ConfigError
from tokenyard.launch.origins import DEFAULT
from tokenyard.launch.reserved import ONLY_VALUES, refuse_group, refuse_value
from tokenyard.launch.schema import COMPONENT_GROUPS, COMPONENT_KEYS, GROUPS, TOP_KEYS, core_fields, unknown_key

_KEY = re.compile(r"(?:\+\+|\+)?[A-Za-z_][\w$.-]*")
_VERBATIM_FLAGS: Mapping[str, str] = {"model.name": "--model"}


@dataclass(frozen=True, slots=True)
class Given:
    """An override as text, and where it was given, for messages: `override x=1`, `flag --x`, `file my.yaml`."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class ParsedOverride:
    """A checked override: `value` is plain data; `is_choice` says that it chooses a group's option."""

    key: str
    value: object
    text: str
    origin: str
    is_choice: bool


def quote_override(key: str, value: str) -> str:
    """The override that gives `key` exactly this text, whatever it contains.

    One text cannot be given: `???`, which means "no value" to Hydra.
    """
    if value == "???":
        raise ConfigError(f"{key}: '???' cannot be given, it is the mark of a value that is missing; use another text")
    return f"{key}={quote_text(value)}"


def quote_text(value: str, *, interpolate: bool = False) -> str:
    """Text as a quoted value of Hydra's override grammar; `${...}` in it stays text unless `interpolate`."""
    if not interpolate:  # OmegaConf: a backslash escapes `${`, and backslashes before it are doubled
        value = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    value = re.sub(r'(\\*)"', lambda match: match[1] * 2 + '\\"', value)
    value = re.sub(r"\\+$", lambda match: match[0] * 2, value)
    return f'"{value}"'


def format_value(value: object) -> str:
    """A value of a YAML file in the override grammar; interpolations stay interpolations."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quote_text(value, interpolate=True)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{format_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(format_value(item) for item in value) + "]"
    return repr(value)


def parse_overrides(given: Sequence[Given]) -> list[ParsedOverride]:
    """Parse and check overrides; of several choices of one component only the last is kept. Raises ConfigError."""
    parser = OverridesParser.create()
    parsed: list[ParsedOverride] = []
    for item in given:
        try:
            parsed.append(_parse(parser, item))
        except ConfigError as error:
            raise ConfigError(f"{error}{located(item.origin)}") from error
    last = {one.key: index for index, one in enumerate(parsed) if one.is_choice or one.key in COMPONENT_KEYS}
    return [one for index, one in enumerate(parsed) if last.get(one.key, index) == index]


def located(origin: str) -> str:
    """Where a value that is wrong was given, unless the message shows it or nobody gave it: ` (from file my.yaml)`."""
    is_default = origin in ("", DEFAULT) or origin.endswith(f"({DEFAULT})")
    return "" if is_default or origin.startswith("override ") else f" (from {origin})"


def _parse(parser: OverridesParser, given: Given) -> ParsedOverride:
    try:
        override = parser.parse_override(given.text)
    except HydraException as error:
        raise _syntax_error(given) from error
    if not override.key_or_group:
        raise ConfigError(f"cannot read {given.text!r}: there is no key before '='")
    _refuse_forms(override, given)
    _refuse_name(override.key_or_group, override.value(), given)
    key, value = override.key_or_group, override.value()
    _check_key(key)
    if key in GROUPS:
        _check_choice(key, value)
    if key in ONLY_VALUES:
        refuse_value(key, value)
    return ParsedOverride(key, value, given.text, given.origin, is_choice=key in GROUPS)


def _syntax_error(given: Given) -> ConfigError:
    key, equals, value = given.text.partition("=")
    if not equals:
        return ConfigError(f"cannot read {given.text!r}: an override is KEY=VALUE, such as scheduler.max_num_seqs=8")
    if not _KEY.fullmatch(key):
        return ConfigError(f"cannot read {given.text!r}: {key!r} is not a key such as scheduler.max_num_seqs")
    flag = _VERBATIM_FLAGS.get(key)
    or_flag = f", or use {flag}, which takes it verbatim" if flag else ""
    reason = "'=' in a value must be quoted" if "=" in value else "the value must be quoted"
    return ConfigError(f"cannot read {given.text!r}: {reason}; write {shell_override(key, value)}{or_flag}")


def shell_override(key: str, value: str) -> str:
    """The override as it is typed in a shell."""
    text = shlex.quote(quote_override(key, value))
    return text if text.isprintable() else repr(text)


def _refuse_forms(override: Override, given: Given) -> None:
    """Refuse the forms of Hydra's grammar that have no use here."""
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(
            f"cannot apply {given.text!r}: nothing can be deleted from the config; set {key}=null or its default"
        )
    if override.package is not None:
        raise ConfigError(f"cannot apply {given.text!r}: groups stay in their place here; write {key}=NAME without '@'")
    if key.partition(".")[0].partition("/")[0] == "hydra":
        raise ConfigError(f"cannot apply {given.text!r}: Hydra's own settings have no effect here; remove it")
    if override.is_sweep_override():
        raise ConfigError(
            f"cannot apply {given.text!r}: it names several values and one run takes one{_as_one(override)}"
        )


def _refuse_name(key: str, value: object, given: Given) -> None:
    """A component's options belong to its name, so only a group's choice brings both."""
    group = "scheduler" if key == "scheduler.policy.name" else key.removesuffix(".name")
    if key.endswith(".name") and group in COMPONENT_GROUPS and given.origin.startswith("override "):
        raise ConfigError(f"cannot apply {given.text!r}: a component is chosen with its options; write {group}={value}")


def _as_one(override: Override) -> str:
    if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP:
        return ""
    key, value = override.key_or_group, override.get_value_string()
    return f"; for a list write '{key}=[{value}]', for text {shell_override(key, value)}"


def _check_key(key: str) -> None:
    refuse_group(key)
    top = key.partition(".")[0]
    if top not in TOP_KEYS:
        raise unknown_key(key, _all_core_keys())


def _all_core_keys() -> list[str]:
    return [*TOP_KEYS, *(f"{group}.{name}" for group, type_ in GROUPS.items() for name in core_fields(type_))]


def _check_choice(group: str, value: object) -> None:
    if isinstance(value, str) and value:
        return
    shown = "null" if value is None else value
    if group in COMPONENT_GROUPS:
        example = f"{group}={COMPONENT_GROUPS[group]().name}"
        raise ConfigError(f"{group}={shown}: a component's name is needed, such as {example}; see `tokenyard plugins`")
    example = "plugins.allow=[...]" if group == "plugins" else "model.name=..."
    raise ConfigError(f"{group}={shown}: set the group's keys one by one, such as {example}")
