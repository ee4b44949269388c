"""Plain data into typed dataclasses. Strict: no text for a number, no number for a truth value, no unknown key."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from tokenyard.errors import ConfigError, PluginError, TokenyardError
from tokenyard.launch.schema import InvalidValueError, field_names, unknown_key

T = TypeVar("T")

_MISSING_VALUE = "???"  # Hydra's mark of a value that must be given
_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Path: "a path",
    dict: "a mapping",
    list: "a list",
}
_SEQUENCES: Mapping[object, Callable[[list[object]], object]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: tuple,
}
_MAPPINGS = (dict, collections.abc.Mapping)


def wrong(key: str, value: object, allowed: str, remedy: str = "") -> InvalidValueError:
    """The error for a value that is not what its key takes."""
    return InvalidValueError(key, f"{key} must be {allowed}, got {show(value)}{remedy}")


def show(value: object) -> str:
    """A value as it is written in YAML, near enough for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except ValueError:  # a whole number of too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:197]}..."


@cache
def type_hints(dataclass_type: type) -> Mapping[str, object]:
    """The resolved annotations of a dataclass."""
    try:
        return typing.get_type_hints(dataclass_type)
    except Exception as error:  # the annotations are a plugin's own code
        raise PluginError(
            f"the types of options {dataclass_type.__module__}.{dataclass_type.__qualname__} cannot be read: {error}; "
            "the plugin must import them outside TYPE_CHECKING"
        ) from error


def to_dataclass(dataclass_type: type[T], data: Mapping[str, object], key: str) -> T:
    """Build a dataclass from plain data; `key` is where the data stands, for messages.

    Raises ConfigError on an unknown key, a wrong type, a missing value, and on what the dataclass itself refuses.
    """
    names = field_names(dataclass_type)
    for name in data:
        if name not in names:
            raise unknown_key(f"{key}.{name}" if key else str(name), [f"{key}.{n}" if key else n for n in names])
    return construct(dataclass_type, convert_fields(dataclass_type, data, key), key)


def convert_fields(dataclass_type: type, data: Mapping[str, object], key: str) -> dict[str, object]:
    """The values of those fields that `data` has or must have; other keys of `data` are left alone."""
    hints = type_hints(dataclass_type)
    values: dict[str, object] = {}
    for field in fields(dataclass_type):
        full_key = f"{key}.{field.name}" if key else field.name
        if not field.init:
            continue
        if data.get(field.name) == _MISSING_VALUE or (field.name not in data and _is_required(field)):
            allowed = in_words(hints[field.name])
            raise InvalidValueError(full_key, f"{full_key} has no value; give it {allowed}: {full_key}=...")
        if field.name in data:
            values[field.name] = convert(data[field.name], hints[field.name], full_key)
    return values


def _is_required(field: Field[object]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def construct(dataclass_type: type[T], values: Mapping[str, object], key: str) -> T:
    """Call the dataclass; what its own checks refuse is told with the key."""
    try:
        return dataclass_type(**values)
    except TokenyardError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidValueError(key, f"{key}: {error}") from error


def may_be_mapping(annotation: object) -> bool:
    """Whether a value of this type may be given as a mapping."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(may_be_mapping(member) for member in typing.get_args(annotation))
    return (origin or annotation) in _MAPPINGS or (isinstance(annotation, type) and is_dataclass(annotation))


def convert(value: object, annotation: object, key: str) -> object:
    """`value` as the annotated type. Raises InvalidValueError naming the key, what was given and what is allowed."""
    if annotation is Any or annotation is object:
        return value
    if isinstance(annotation, typing.NewType):
        return convert(value, annotation.__supertype__, key)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return _convert_literal(value, annotation, key)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, annotation, key)
    if (origin or annotation) in _SEQUENCES:
        return _convert_sequence(value, annotation, key)
    if (origin or annotation) in _MAPPINGS:
        return _convert_mapping(value, annotation, key)
    return _convert_class(value, annotation, key)


def _convert_class(value: object, annotation: object, key: str) -> object:
    if annotation is None or annotation is type(None):
        if value is not None:
            raise wrong(key, value, "null")
        return None
    if not isinstance(annotation, type):
        raise PluginError(
            f"{key}: an option of type {annotation!r} is not supported; the plugin must use a plainer type"
        )
    if is_dataclass(annotation):
        if not isinstance(value, Mapping):
            raise wrong(key, value, in_words(annotation))
        return to_dataclass(annotation, cast("Mapping[str, object]", value), key)
    if issubclass(annotation, Enum):
        return _convert_enum(value, annotation, key)
    return _convert_scalar(value, annotation, key)


def _convert_scalar(value: object, annotation: type, key: str) -> object:
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise wrong(key, value, "a number that a float can hold") from None
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if annotation not in (bool, int, float, str, Path):
        raise PluginError(
            f"{key}: an option of type {annotation.__name__} is not supported; the plugin must use a plainer type"
        )
    if type(value) is not annotation:
        raise wrong(key, value, in_words(annotation), _remedy(value, annotation))
    return value


def _remedy(value: object, annotation: type) -> str:
    if value == "":
        return " (nothing after '=')"
    if annotation in (int, float) and isinstance(value, str):
        return " (text)"
    if annotation is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if annotation is str and isinstance(value, int | float):
        return "; quote it to make it text: '\"...\"'"
    return ""


def _convert_literal(value: object, annotation: object, key: str) -> object:
    for choice in typing.get_args(annotation):
        if type(choice) is type(value) and choice == value:
            return value
    raise wrong(key, value, in_words(annotation))


def _convert_enum(value: object, annotation: type[Enum], key: str) -> Enum:
    if isinstance(value, str) and value in annotation.__members__:
        return annotation[value]  # names first: one member's value may be another's name
    for member in annotation:
        if type(value) is type(member.value) and value == member.value:
            return member
    raise wrong(key, value, in_words(annotation))


def _convert_union(value: object, annotation: object, key: str) -> object:
    members = typing.get_args(annotation)
    mappings = [member for member in members if may_be_mapping(member)]
    if isinstance(value, Mapping) and len(mappings) == 1:
        return convert(value, mappings[0], key)  # so what that one refuses is told
    exact = [member for member in members if member is type(value)]
    problems: list[ConfigError] = []
    for member in [*exact, *members]:
        try:
            return convert(value, member, key)
        except InvalidValueError as error:
            problems.append(error.with_traceback(None))  # which holds this frame, and so all its callers' objects
        except ConfigError as error:  # an unknown key inside: more telling than the list of types
            if isinstance(value, Mapping):
                raise
            problems.append(error.with_traceback(None))
    deeper = [error for error in problems if isinstance(error, InvalidValueError) and error.key != key]
    if deeper:
        raise deeper[0]
    raise wrong(key, value, in_words(annotation))


def _convert_sequence(value: object, annotation: object, key: str) -> object:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(key, value, in_words(annotation), f"; write {key}=[...]")
    build = _SEQUENCES[typing.get_origin(annotation) or annotation]
    arguments = typing.get_args(annotation) or (object,)
    if build is tuple and Ellipsis not in arguments and typing.get_origin(annotation) is tuple:
        if len(value) != len(arguments):
            raise wrong(key, value, in_words(annotation))
        item_types: Sequence[object] = arguments
    else:
        item_types = [arguments[0]] * len(value)
    return build(
        [convert(item, type_, f"{key}[{i}]") for i, (item, type_) in enumerate(zip(value, item_types, strict=True))]
    )


def _convert_mapping(value: object, annotation: object, key: str) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise wrong(key, value, in_words(annotation))
    key_type, value_type = typing.get_args(annotation) or (object, object)
    return {
        convert(name, key_type, f"a key of {key}"): convert(item, value_type, f"{key}.{name}")
        for name, item in value.items()
    }


def in_words(annotation: object) -> str:
    """What a type takes, for people: `a whole number or null`."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Literal:
        choices = [show(choice) for choice in arguments]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(in_words(member) for member in arguments)
    if annotation in _WORDS or annotation is None:
        return _WORDS.get(annotation, "null")
    if (origin or annotation) in _SEQUENCES:
        items = [in_words(item) for item in arguments if item is not Ellipsis]
        return f"a list, its items {' and '.join(items)}" if items else "a list"
    if (origin or annotation) in _MAPPINGS:
        return f"a mapping from {in_words(arguments[0])} to {in_words(arguments[1])}" if arguments else "a mapping"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"one of {', '.join(show(_enum_text(member)) for member in annotation)}"
    if isinstance(annotation, type) and is_dataclass(annotation):
        return f"a mapping with the keys {', '.join(field_names(annotation))}"
    return str(annotation)


def _enum_text(member: Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name
