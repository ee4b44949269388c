"""Config keys: the dataclasses of tokenyard.config, options of built-in components, and what is refused."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import fields

from tokenyard.bench.keys import GROUP, meaning_of
from tokenyard.bench.settings import SETTINGS
from tokenyard.config import EngineConfig, PluginsConfig, PolicyConfig
from tokenyard.launch.convert import in_words, show, type_hints
from tokenyard.launch.flags import _FLAGS
from tokenyard.launch.nodes import MISSING_VALUE, default_of
from tokenyard.launch.reserved import ONLY_VALUES, RESERVED_GROUPS
from tokenyard.launch.schema import COMPONENT_GROUPS, COMPONENT_KEYS, GROUPS, TOP_VALUES, core_fields, field_names
from tokenyard.plugins import load_catalogue

from reference_sections.markdown import code, joined, table, word_list
from reference_sections.source import doc_of, fields_of

if typing.TYPE_CHECKING:
    from tokenyard.catalogue import Entry

_TITLES = ("key", "takes", "default", "meaning")
_FLAG_HELP = {flag.key: flag.help for flag in _FLAGS}
_LISTS = ("observers", "logits_processors")
_LIST_TAKES = "a list of names, or of mappings with a name and options"
_NAME_TAKES = "a name, or a mapping with a name and options"
_KEY_OF_KIND = {kind: key for key, kind in COMPONENT_KEYS.items() if kind != "policy"}


def groups() -> str:
    """A table for the top-level keys, and one for each group."""
    top = joined(["## Top level", table(_TITLES, _rows(EngineConfig, "", list(TOP_VALUES)))])
    return joined([top, *(_group(name, config_type) for name, config_type in GROUPS.items())])


def _group(name: str, config_type: type) -> str:
    rows = _rows(config_type, f"{name}.", core_fields(config_type))
    if name == "scheduler":
        rows += _rows(PolicyConfig, "scheduler.policy.", ["name"])
    about = re.sub(r"^Group `\w+`[.:]\s*", "", doc_of(config_type))
    return joined([f"## {name}", about[:1].upper() + about[1:], table(_TITLES, rows)])


def _rows(config_type: type, prefix: str, names: list[str]) -> list[tuple[str, str, str, str]]:
    hints = type_hints(config_type)
    comments = {field.name: field.meaning for field in fields_of(config_type)}
    return [
        (
            code(prefix + field.name),
            _takes_at(prefix + field.name, hints[field.name]),
            _default(default_of(field)),
            _meaning(prefix + field.name, comments.get(field.name, "") or meaning_of(field)),
        )
        for field in fields(config_type)
        if field.name in names
    ]


def _default(value: object) -> str:
    return "must be given" if value == MISSING_VALUE else code(show(value).strip("'"))


def _takes_at(key: str, annotation: object) -> str:
    if key in _LISTS:
        return _LIST_TAKES
    if key in COMPONENT_KEYS:
        return f"{_NAME_TAKES}, or null" if type(None) in typing.get_args(annotation) else _NAME_TAKES
    return _takes(annotation)


def _takes(annotation: object) -> str:
    """A type in words; `in_words` alone would leave open whether null stands in a list or for it."""
    members = typing.get_args(annotation)
    if any(typing.get_origin(member) is tuple for member in members):
        return ", or ".join(_takes(member) for member in members)
    return (
        re.sub(r"'(\w+)'", r"`\1`", in_words(annotation))
        .replace("a list, its items", "a list of")
        .replace("list of a whole number", "list of whole numbers")
    )


def _meaning(key: str, comment: str) -> str:
    """The comment beside the field in the words of a YAML file; else what the flag's help says."""
    group, _, name = key.rpartition(".")
    if name == "name" and not comment:
        return f"the component; {code(group.partition('.')[0] + '=NAME')} chooses it with its options"
    if key in _LISTS:
        return f"see [{key.replace('_', ' ')}](#{key.replace('_', '-')})"
    return re.sub(r"\bNone\b", "null", comment or _FLAG_HELP.get(key, ""))


def components() -> str:
    """The built-in components and their options."""
    entries = load_catalogue(PluginsConfig(allow=())).entries()
    listing = table(("choose it with", "what it is", "options"), (_component(entry) for entry in entries))
    return joined([listing, *_option_tables(entries)])


def _component(entry: Entry) -> tuple[str, str, str]:
    options = field_names(entry.descriptor.options_type)
    return code(_choice(entry)), entry.descriptor.summary, ", ".join(code(name) for name in options) or "none"


def _choice(entry: Entry) -> str:
    if f"{entry.kind}s" in _LISTS:
        return f"{entry.kind}s=[{entry.name}]"
    if entry.kind in _KEY_OF_KIND:
        return f"{_KEY_OF_KIND[entry.kind]}={entry.name}"
    group = "scheduler" if entry.kind == "policy" else entry.kind
    return f"{group}={entry.name}" if group in COMPONENT_GROUPS else f"{entry.kind}: {entry.name}"


def _option_tables(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        options_type = entry.descriptor.options_type
        if names := field_names(options_type):
            prefixes = {
                "policy": "scheduler.policy.",
                **dict.fromkeys((*_KEY_OF_KIND, *(one[:-1] for one in _LISTS)), ""),
            }
            prefix = prefixes.get(entry.kind, f"{entry.kind}.")
            yield f"### Options of {code(_choice(entry))}"
            yield table(_TITLES, _rows(options_type, prefix, names))


def bench() -> str:
    """The keys of the group `bench`, which belong to the command of that name."""
    return joined(
        joined(
            [
                f"Keys of `tokenyard bench {kind}`:",
                table(_TITLES, _rows(settings_type, f"{GROUP}.", field_names(settings_type))),
            ]
        )
        for kind, settings_type in SETTINGS.items()
    )


def reserved() -> str:
    """Names that are kept for later."""
    rows = [(code(key), code(show(value).strip("'")), "is there, with one value") for key, value in ONLY_VALUES.items()]
    return joined(
        [
            "These keys accept the one value that says what happens anyway:",
            table(("key", "value", "the key"), rows),
            "These groups are refused:",
            word_list(sorted(RESERVED_GROUPS)),
        ]
    )
