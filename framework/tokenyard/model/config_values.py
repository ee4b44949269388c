"""Typed values of a config.json: what is there must hold; what is absent or null has a default, or is named.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tokenyard.errors import ModelLoadError

LARGEST_NUMBER: Final = 1e30  # beyond these a config.json is damaged
_LARGEST_SIZE, _MOST_LAYERS = 2**31, 10_000


def integer(config: Mapping[str, object], key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of at least `least`."""
    value = config.get(key)
    if value is None:
        value = default
    limit = _MOST_LAYERS if key == "num_hidden_layers" else _LARGEST_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
        raise ModelLoadError(
            f"config.json: '{key}' must be an integer from {least} to {limit}, got {config.get(key)!r}"
        )
    return value


def number(config: Mapping[str, object], key: str, default: float) -> float:
    """A positive number."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST_NUMBER:
        raise ModelLoadError(f"config.json: '{key}' must be a positive number below {LARGEST_NUMBER:g}, got {value!r}")
    return float(value)


def flag(config: Mapping[str, object], key: str) -> bool:
    """A truth value; False when nothing is said."""
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelLoadError(f"config.json: '{key}' must be true or false, got {value!r}")
    return value
