"""check_positive: numbers in a plugin's options that must be above 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_positive(options: object, *, below: float = math.inf) -> None:
    """Raise ValueError for the first number of an options dataclass that is not above 0, and below `below`.

    Those in its mappings are looked at too; fields that are no numbers, None among them, are not (since API 1.7).
    """
    for name, value in _numbers(options):
        if not 0 < value < below:  # also refuses NaN
            limit = "" if below == math.inf else f" and below {below:.0f}"
            raise ValueError(f"{name}={value} is not valid: it must be a number above 0{limit}")


def _numbers(options: object) -> Iterator[tuple[str, float]]:
    for field in fields(options) if is_dataclass(options) else ():
        value = getattr(options, field.name)
        named = {f"{field.name}.{key}": one for key, one in value.items()} if isinstance(value, Mapping) else None
        for name, one in ({field.name: value} if named is None else named).items():
            if isinstance(one, int | float) and not isinstance(one, bool):
                yield name, one
