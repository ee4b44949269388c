"""Checks of single sampling parameters: each takes a field's name and value and returns the value in its normal form.

They raise ValidationError (UnsupportedError for what is not there yet) in one line of bounded length. What more than
one field decides is in `tokenyard.sampling_params`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from enum import Enum
from typing import TypeAlias

from tokenyard.errors import UnsupportedError, ValidationError

Check: TypeAlias = Callable[[str, object], object]

_MOST_SHOWN = 200  # characters of a value in a message
_MOST_LISTED = 1000  # of a list of values
_TOKEN_ID = re.compile(r"\d{1,10}", re.ASCII)
_IDS_IN_WORDS = "token ids, which are integers of at least 0"
MAX_TOKEN_ID = 2**31 - 1  # ids are 32-bit numbers everywhere
MAX_BIAS = 100.0
MAX_LISTED = 2**20  # ids that a list is looked through for, repeated ones included


def short(value: object) -> str:
    """A value for a message: `repr`, cut."""
    try:
        text = repr(_beginning(value))
    except Exception:  # a number of too many digits, or a class of the user's own
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _beginning(value: object) -> object:
    """All of a value that a message can show, and a little more: the rest may be a million items."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > _MOST_SHOWN:
        return value[: _MOST_SHOWN + 1]
    if isinstance(value, dict) and len(value) > _MOST_SHOWN:
        return dict(itertools.islice(value.items(), _MOST_SHOWN))
    return value


def invalid(parameter: str, value: object, allowed: str) -> ValidationError:
    """The error for a value that its parameter does not take."""
    return ValidationError(
        f"{parameter}={short(value)} is not valid: it must be {allowed}", parameter=parameter, value=value
    )


def num_items(value: Sized) -> int:
    """How many items something has, without a look at them; what is too many to be told is `sys.maxsize`.

    Before a walk over what a user gives: `range(10**12)` is a sequence too.
    """
    try:
        return len(value)
    except OverflowError:
        return sys.maxsize


def is_number(value: object) -> bool:
    """A finite number that is no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(low: float, high: float, *, above_low: bool = False) -> Check:
    """A number from `low` (or only above it) to `high`."""
    allowed = f"a number {'above' if above_low else 'from'} {low:g} {'and up ' if above_low else ''}to {high:g}"

    def check(parameter: str, value: object) -> float:
        if not isinstance(value, int | float) or not is_number(value) or not low <= value <= high:
            raise invalid(parameter, value, allowed)
        if above_low and value == low:
            raise invalid(parameter, value, allowed)
        return float(value)

    return check


def integer(low: int, high: int, *, also: Mapping[object, int | None] | None = None, words: str = "") -> Check:
    """An integer from `low` to `high`, or one of the keys of `also`, which stand for what they map to.

    `words` says in the message what None and the other special values mean.
    """
    most = {2**31 - 1: "2**31 - 1", 2**63 - 1: "2**63 - 1"}.get(high, high)
    allowed = f"an integer of at least {low} and at most {most}{words}"
    special = {(type(key), key): meaning for key, meaning in (also or {}).items()}  # True is no 1

    def check(parameter: str, value: object) -> int | None:
        if value is None or isinstance(value, bool | int):
            key = (type(value), value)
            if key in special:
                return special[key]
            if isinstance(value, int) and is_int(value) and low <= value <= high:
                return value
        raise invalid(parameter, value, allowed)

    return check


def truth(parameter: str, value: object) -> bool:
    """True or false, and no number."""
    if not isinstance(value, bool):
        raise invalid(parameter, value, "true or false")
    return value


def truth_or_none(parameter: str, value: object) -> bool | None:
    """True, false or None."""
    return None if value is None else truth(parameter, value)


def member(kind: type[Enum]) -> Check:
    """A member of an enumeration."""
    allowed = f"one of {', '.join(f'{kind.__name__}.{one.name}' for one in kind)}"

    def check(parameter: str, value: object) -> Enum:
        if not isinstance(value, kind):
            raise invalid(parameter, value, allowed)
        return value

    return check


def strings(most: int, longest: int, *, none: tuple[str, ...] | None = ()) -> Check:
    """A string, or up to `most` of them, none empty or above `longest` characters; each once, in order.

    `none` is what an empty list and None become.
    """
    allowed = "a non-empty string or a list of non-empty strings"

    def check(parameter: str, value: object) -> tuple[str, ...] | None:
        given: object = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray | memoryview):
            raise invalid(parameter, value, allowed)
        _check_count(parameter, num_items(given), most, "strings")
        for one in given:
            if not isinstance(one, str) or not one:
                raise invalid(parameter, value, allowed)
            if len(one) > longest:
                raise ValidationError(
                    f"{parameter}: {short(one)} has {len(one)} characters; at most {longest} are allowed",
                    parameter=parameter,
                    value=value,
                )
        return tuple(dict.fromkeys(given)) or none

    return check


def token_ids(most: int, *, empty: bool = True) -> Check:
    """A list of up to `most` different token ids; each once, in order. `empty` says whether it may have none."""
    allowed = f"a {'' if empty else 'non-empty '}list of {_IDS_IN_WORDS}"

    def check(parameter: str, value: object) -> tuple[int, ...]:
        given: object = () if value is None and empty else value
        if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray | memoryview):
            raise invalid(parameter, value, allowed)
        _check_count(parameter, num_items(given), MAX_LISTED, "token ids")
        if bad := [one for one in given if not is_int(one) or not 0 <= one <= MAX_TOKEN_ID]:
            raise invalid(parameter, value, f"{allowed}, without {listed(bad)}")
        unique = tuple(dict.fromkeys(given))
        if not unique and not empty:
            raise invalid(parameter, value, allowed)
        _check_count(parameter, len(unique), most, "token ids")
        return unique

    return check


def logit_bias(most: int) -> Check:
    """Token id -> what is added to its logit; keys may be digits, and values are clipped to [-100, 100]."""

    def check(parameter: str, value: object) -> dict[int, float] | None:
        if not isinstance(value, Mapping):
            raise invalid(parameter, value, f"a dict from {_IDS_IN_WORDS} to numbers")
        _check_count(parameter, len(value), most, "entries")
        biases, bad_keys, bad_values = _read_biases(value)
        problems = []
        if bad_keys:
            problems.append(f"keys {listed(bad_keys)} are not {_IDS_IN_WORDS}, each given once")
        if bad_values:
            problems.append(f"the values of keys {listed(bad_values)} are not numbers")
        if problems:
            raise ValidationError(f"{parameter}: {' and '.join(problems)}", parameter=parameter, value=value)
        return biases or None

    return check


def _read_biases(given: Mapping[object, object]) -> tuple[dict[int, float], list[object], list[object]]:
    """(what can be read, the keys that are none, the keys whose values are none)."""
    biases: dict[int, float] = {}
    bad_keys: list[object] = []
    bad_values: list[object] = []
    for key, bias in given.items():
        token_id = _as_token_id(key)
        if token_id is None or token_id in biases:
            bad_keys.append(key)
        elif not isinstance(bias, int | float) or isinstance(bias, bool) or bias != bias:
            bad_values.append(key)
        else:
            biases[token_id] = float(max(-MAX_BIAS, min(MAX_BIAS, bias)))
    return biases, bad_keys, bad_values


def _as_token_id(key: object) -> int | None:
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        key = int(key)
    return key if isinstance(key, int) and is_int(key) and 0 <= key <= MAX_TOKEN_ID else None


def json_object(longest: int) -> Check:
    """A dict of what JSON can say, of at most `longest` characters as JSON; the caller's own is copied."""

    def check(parameter: str, value: object) -> dict[str, object] | None:
        try:
            text = json.dumps(value, allow_nan=False)
            copied: object = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise _no_json(parameter, value, f" ({error})") from error
        if not isinstance(copied, dict) or copied != value:  # JSON makes text of keys, and lists of tuples
            raise _no_json(parameter, value)
        if len(text) > longest:
            raise ValidationError(
                f"{parameter} has {len(text)} characters as JSON; at most {longest} are allowed",
                parameter=parameter,
                value=value,
            )
        return copied or None

    return check


def unavailable(default: object) -> Check:
    """For a field of a feature that is not there yet: nothing but its default."""

    def check(parameter: str, value: object) -> object:
        if type(value) is type(default) and value == default:
            return default
        raise UnsupportedError(
            f"SamplingParams: {parameter}={short(value)} is not available in this version; leave it at {default!r}",
            parameter=parameter,
            value=value,
        )

    return check


def _check_count(parameter: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ValidationError(
            f"{parameter} has {count} {what}; at most {most} are allowed", parameter=parameter, value=count
        )


def _no_json(parameter: str, value: object, why: str = "") -> ValidationError:
    return invalid(
        parameter, value, f"a dict with text as keys, of numbers, text, true, false, None, lists, dicts{why}"
    )


def listed(items: Iterable[object]) -> str:
    """All of them, as long as a line can hold them."""
    text = ", ".join(map(short, items))
    return text if len(text) <= _MOST_LISTED else f"{text[:_MOST_LISTED]}..."
