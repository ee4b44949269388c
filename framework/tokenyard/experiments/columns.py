"""Columns that grow, and the times between tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from tokenyard.experiments.records import TokenGaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ScalarT = TypeVar("ScalarT", bound=np.generic)

_FIRST = 1024
_MOST_GAPS = 1 << 17  # values that are kept apart
_BINS_PER_NEPER = 2000  # of what more come to: 0.025 % off at most


class Column(Generic[ScalarT]):
    """An array with room at its end: `data` is longer than what it holds, and what is beyond has no meaning."""

    def __init__(self, dtype: type[ScalarT]) -> None:
        self.data: NDArray[ScalarT] = np.empty(_FIRST, dtype=dtype)

    def reserve(self, length: int) -> None:
        """Make room for `length` values."""
        old = self.data
        if length > len(old):
            self.data = np.empty(max(length, 2 * len(old)), dtype=old.dtype)  # memory that is not touched costs none
            self.data[: len(old)] = old


class RareColumn(Generic[ScalarT]):
    """A column whose values nearly always are the same one: until another comes, it takes no memory."""

    def __init__(self, dtype: type[ScalarT], usual: float) -> None:
        self._dtype, self._usual = dtype, usual
        self._data: NDArray[ScalarT] | None = None

    def put(self, row: int, value: float) -> None:
        """Set a value; rows that nobody sets have the usual one."""
        if self._data is None:
            if value == self._usual or value != value:  # NaN is the usual one of times
                return
            self._data = np.full(max(_FIRST, row + 1), self._usual, dtype=self._dtype)
        elif row >= len(self._data):
            more = np.full(max(len(self._data), row + 1 - len(self._data)), self._usual, dtype=self._dtype)
            self._data = np.concatenate((self._data, more))
        self._data[row] = value

    def values(self, length: int) -> NDArray[ScalarT]:
        """[length], read-only."""
        if self._data is None:
            return np.broadcast_to(np.array(self._usual, dtype=self._dtype), length)
        missing = length - len(self._data)
        if missing > 0:
            self._data = np.concatenate((self._data, np.full(missing, self._usual, dtype=self._dtype)))
        return self._data[:length]


class Names:
    """Names as numbers, in order of their first appearance; -1 = no name."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {None: -1}

    def number(self, name: str | None) -> int:
        return self._numbers.setdefault(name, len(self._numbers) - 1)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in self._numbers if name is not None)


class GapCounter:
    """Counts times between tokens. Most of a step's are equal, since its requests got their last tokens together.

    Two that are the same to a nanosecond are one: the clock's own rounding would tell them apart. Beyond 131,072
    different ones they are kept in bins, so that memory stays bounded.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by nanoseconds: where in the lists below
        self._seconds: list[float] = []  # the first of each
        self._counts: list[int] = []
        self._bins: NDArray[np.int64] | None = None
        self._first_bin = 0

    def add(self, seconds: float, count: int) -> None:
        """`count` gaps of the same length."""
        number = self._numbers.setdefault(round(seconds * 1e9), len(self._seconds))
        if number < len(self._seconds):
            self._counts[number] += count
            return
        self._seconds.append(seconds)
        self._counts.append(count)
        if len(self._seconds) >= _MOST_GAPS:
            self._compress()

    def extend(self, seconds: Sequence[float]) -> None:
        """Gaps of different lengths."""
        for one in seconds:
            self.add(one, 1)

    def gaps(self) -> TokenGaps:
        seconds, counts = np.array(self._seconds, dtype=np.float64), np.array(self._counts, dtype=np.int64)
        if self._bins is None:
            return TokenGaps(seconds=seconds, counts=counts)
        used = np.flatnonzero(self._bins)
        middles = np.exp((used + self._first_bin + 0.5) / _BINS_PER_NEPER)
        return TokenGaps(
            seconds=np.concatenate((middles, seconds)),
            counts=np.concatenate((self._bins[used], counts)),
            relative_error=float(np.expm1(0.5 / _BINS_PER_NEPER)),
        )

    def _compress(self) -> None:
        """Put what was kept apart into bins."""
        bins = np.floor(np.log(np.maximum(self._seconds, 1e-12)) * _BINS_PER_NEPER).astype(np.int64)
        lowest, highest = int(bins.min()), int(bins.max())
        if self._bins is not None:
            lowest = min(lowest, self._first_bin)
            highest = max(highest, self._first_bin + len(self._bins) - 1)
        grown = np.zeros(highest - lowest + 1, dtype=np.int64)
        if self._bins is not None:
            start = self._first_bin - lowest
            grown[start : start + len(self._bins)] = self._bins
        np.add.at(grown, bins - lowest, self._counts)
        self._bins, self._first_bin = grown, lowest
        self._numbers, self._seconds, self._counts = {}, [], []
