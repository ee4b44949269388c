"""Sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenyard.arrays import LongArray


def window_start(positions: LongArray, window: int | None) -> LongArray:
    """The first position that the query at each of `positions` sees."""
    return np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
