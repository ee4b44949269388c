"""What the settings of all kinds of `tokenyard bench` share: the group of their keys, meanings and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field

from tokenyard.launch.convert import wrong

GROUP = "bench"
MAX_PROMPT = 65536
MAX_ITERS = 10_000
MAX_SEED = 2**32 - 1
_ABOUT = "about"


def about(text: str) -> Mapping[str, str]:
    """The metadata of a key: what it means, in a line."""
    return {_ABOUT: text}


def meaning_of(key: Field[object]) -> str:
    """What the key of a benchmark means, in a line; empty for a field of another dataclass."""
    text: str = key.metadata.get(_ABOUT, "")
    return text


def in_range(name: str, value: int, unit: str, most: int, *, least: int = 1) -> None:
    """Raise InvalidValueError for a value out of its range."""
    if not least <= value <= most:
        raise wrong(f"{GROUP}.{name}", value, f"a whole number{unit and f' of {unit}'}, {least} to {most}")
