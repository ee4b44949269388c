"""Plain data into dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenyard.errors import ConfigError, PluginError
from tokenyard.launch.convert import convert, in_words, to_dataclass
from tokenyard.launch.nodes import defaults_of


class Color(Enum):
    RED = "red"
    BLUE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = 1
    required: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    limit: int = 3

    def __post_init__(self) -> None:
        if self.limit > 9:
            raise ValueError("limit is at most 9")


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (3, int | None, 3),
        (None, int | None, None),
        (3, str | int | None, 3),
        ("3", str | int | None, "3"),
        (True, bool | int, True),
        (1, bool | int, 1),
        (2, float | str, 2.0),
        ("a", Literal["a", 1], "a"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1], list[float], [1.0]),
        ([1], frozenset[int], frozenset({1})),
        ([1], Sequence[int], (1,)),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ("red", Color, Color.RED),
        ("BLUE", Color, Color.BLUE),
        ("x/y", Path, Path("x/y")),
        ([{"anything": 1}], Any, [{"anything": 1}]),
        ({"required": "x"}, Inner | None, Inner(required="x")),
    ],
)
def test_a_value_of_the_right_kind_is_converted(value: object, annotation: object, expected: object) -> None:
    converted = convert(value, annotation, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (True, float),
        (1, bool),
        ("8", int),
        ("true", bool),
        (8.0, int),
        (3, str),
        (None, int),
        (True, Literal[1]),
        (1.0, Literal[1]),
        ("abc", tuple[str, ...]),
        ([1], tuple[int, str]),
        ("green", Color),
        (2.0, Color),
        ({"a": "x"}, dict[str, int]),
        ([], Inner),
        ("x", int | None),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_is_allowed(value: object, annotation: object) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(value, annotation, "group.key")
    assert "group.key" in str(caught.value)
    assert " must be " in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"inner": {"required": "x", "sise": 2}}, "did you mean 'k.inner.size'"),
        ({"inner": {}}, "k.inner.required has no value"),
        ({"inner": {"required": "???"}}, "k.inner.required has no value"),
        ({"limit": "???"}, "k.limit has no value"),
        ({"inner": {"required": 3}}, "k.inner.required must be text"),
        ({"inners": [{"required": "x"}, {"required": 3}]}, "k.inners[1].required must be text"),
        ({"by_name": {"a": {"required": 3}}}, "k.by_name.a.required must be text"),
        ({"limit": 10}, "limit is at most 9"),
    ],
)
def test_a_mistake_deep_inside_is_told_with_its_full_key(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_dataclass(Outer, data, "k")
    assert message in str(caught.value)


def test_options_with_a_type_that_cannot_be_filled_blame_the_plugin() -> None:
    with pytest.raises(PluginError, match="complex"):
        convert(3, complex, "key")
    with pytest.raises(PluginError, match="TYPE_CHECKING"):
        to_dataclass(_unreadable(), {"value": 3}, "key")


def _unreadable() -> type:
    @dataclass
    class Unreadable:
        value: NotImported  # type: ignore[name-defined]  # noqa: F821

    return Unreadable


def test_the_defaults_of_a_dataclass_convert_to_themselves() -> None:
    assert to_dataclass(Outer, defaults_of(Outer), "k") == Outer()
    assert defaults_of(Inner) == {"size": 1, "required": "???"}


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "a whole number or null"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (dict[str, int], "a mapping from text to a whole number"),
        (Inner, "a mapping with the keys size, required"),
        (Color, "one of 'red', 'BLUE'"),
    ],
)
def test_types_are_told_in_words(annotation: object, words: str) -> None:
    assert in_words(annotation) == words
