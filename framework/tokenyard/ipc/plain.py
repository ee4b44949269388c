"""Typed values as plain data, which `tokenyard.launch.convert` makes typed again by the same annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath

_INTEGERS = range(-(2**63), 2**64)  # what a message holds


def to_plain(value: object) -> object:
    """Dicts, lists, text, numbers, truth values and None; raises TypeError for what cannot be said with them."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | float | str) or (isinstance(value, int) and value in _INTEGERS):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return dataclass_values(value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return [to_plain(item) for item in value]
    raise TypeError(f"a value of type {type(value).__name__} does not travel between processes: {value!r:.200}")


def dataclass_values(value: object) -> dict[str, object]:
    """The fields that a dataclass's constructor takes, as plain data."""
    return {one.name: to_plain(getattr(value, one.name)) for one in fields(value) if one.init}  # type: ignore[arg-type]
