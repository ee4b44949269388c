"""Stays: what is looked up once for each stay of a request in a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray, LongArray


class Stays:
    """Which stay in each slot was looked at last, told apart by the slot's generation."""

    def __init__(self) -> None:
        self._known = np.zeros(0, dtype=np.int32)  # [slots]; 0 = none, since generations count from 1

    def __len__(self) -> int:
        """Slots that were looked at are below this number."""
        return len(self._known)

    def look(self, slots: LongArray, generations: IntArray) -> list[int]:
        """Rows of these that were not looked at yet; from now on they were."""
        if len(slots) and (missing := int(slots.max()) + 1 - len(self._known)) > 0:
            self._known = np.pad(self._known, (0, max(missing, len(self._known))))
        rows: list[int] = np.flatnonzero(self._known[slots] != generations).tolist()
        self._known[slots] = generations
        return rows

    def forget(self) -> None:
        """None was looked at."""
        self._known[:] = 0
