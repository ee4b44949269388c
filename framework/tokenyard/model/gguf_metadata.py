"""Typed look-ups in a GGUF file's metadata, with errors that name the file, the key and what was expected."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError

if TYPE_CHECKING:
    from tokenyard.model.gguf_reader import GGUFHeader, GGUFValue

_MAX_SHOWN = 60


class Metadata:
    """The metadata of one file. A key that is absent gives the default; a value of a wrong type never does."""

    def __init__(self, header: GGUFHeader) -> None:
        self._path = header.path
        self._values = header.metadata

    @property
    def path(self) -> Path:
        """The file, for messages."""
        return self._path

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return key in self._values

    def names(self, prefix: str) -> list[str]:
        """What follows the prefix in the keys that begin with it."""
        return [key.removeprefix(prefix) for key in self._values if key.startswith(prefix)]

    def text(self, key: str, default: str | None = None) -> str:
        """A string; without a default the key must be there."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least 0; without a default the key must be there."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.wrong(key, "a number of at least 0")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 0; without a default the key must be there."""
        value = self._values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, "a whole number of at least 0")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; without a default the key must be there."""
        value = self.whole(key, default)
        if value < 1:
            raise self.wrong(key, "a whole number above 0")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings, which must be there."""
        values = self._array(key)
        strings = [value for value in values if isinstance(value, str)]
        if len(strings) != len(values):
            raise self.wrong(key, "an array of text")
        return strings

    def numbers(self, key: str) -> list[float]:
        """An array of finite numbers, which must be there."""
        values = self._array(key)
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if len(numbers) != len(values) or not all(map(math.isfinite, numbers)):
            raise self.wrong(key, "an array of finite numbers")
        return numbers

    def flags(self, key: str) -> list[bool]:
        """An array of true and false, which must be there."""
        values = self._array(key)
        flags = [value for value in values if isinstance(value, bool)]
        if len(flags) != len(values):
            raise self.wrong(key, "an array of true and false")
        return flags

    def is_array(self, key: str) -> bool:
        """Whether the key is there and holds an array."""
        return isinstance(self._values.get(key), list)

    def refuse(self, reason: str, allowed: Collection[str] = ()) -> ModelLoadError:
        """The error for what this version does not do with GGUF files."""
        options = f"; allowed: {', '.join(sorted(allowed))}" if allowed else ""
        return ModelLoadError(
            f"{self._path}: {reason}, which is not available for GGUF files{options}. Give the model's safetensors "
            "folder instead"
        )

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        """The error for a value of a wrong type, or a key that is not there."""
        if key not in self._values:
            return ModelLoadError(
                f"{self._path}: no key {key!r}; {expected} is expected. Is it a whole language model?"
            )
        return ModelLoadError(f"{self._path}: key {key!r} is {_shown(self._values[key])}; {expected} is expected")

    def _array(self, key: str) -> list[int | float | bool | str]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, "an array")
        return value


def _shown(value: GGUFValue) -> str:
    shown = f"an array of {len(value)}" if isinstance(value, list) else repr(value)
    return shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "..."
