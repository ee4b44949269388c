"""Means and percentiles of columns, as JSON has them: what is not there is None, never NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

Summary: TypeAlias = dict[str, float | None]

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SUMMARY_KEYS = ("mean", *PERCENTILES, "max")

_PIECE = 1 << 16


def summary(values: Floats) -> Summary:
    """Of the values that are there: a NaN is one that is not. Percentiles interpolate linearly, as numpy's do.

    Reorders `values`, so that no copy of a long column is made.
    """
    missing = np.isnan(values)
    if missing.any():
        values = values[~missing]
    if not len(values):
        return dict.fromkeys(SUMMARY_KEYS)
    mean, largest = float(np.mean(values)), float(np.max(values))
    found = np.quantile(values, list(PERCENTILES.values()), overwrite_input=True)
    return {key: finite(value) for key, value in zip(SUMMARY_KEYS, [mean, *found.tolist(), largest], strict=True)}


def weighted_summary(values: Floats, counts: NDArray[np.int64]) -> Summary:
    """Of each value as often as its count says, without writing it out so often."""
    if not counts.all():
        values, counts = values[counts > 0], counts[counts > 0]
    if not len(values):
        return dict.fromkeys(SUMMARY_KEYS)
    mean, largest = float(values @ counts) / int(counts.sum()), float(values.max())
    found = weighted_quantiles(values, counts, list(PERCENTILES.values()))
    return {key: finite(value) for key, value in zip(SUMMARY_KEYS, [mean, *found, largest], strict=True)}


def weighted_quantiles(values: Floats, counts: NDArray[np.int64], shares: Sequence[float]) -> list[float]:
    """`np.quantile(np.repeat(values, counts), shares)`: of n values in order, the one at place (n - 1) * share.

    Counts are above 0. Values 1 and 3, twice each, are 1 1 3 3; the median lies at place 1.5, between 1 and 3: 2.
    """
    order = np.argsort(values)
    values, upto = values[order], np.cumsum(counts[order])  # the value of place p is the first one with upto > p
    found: list[float] = []
    for share in shares:
        place = (int(upto[-1]) - 1) * share
        below = math.floor(place)
        indices = np.searchsorted(upto, [below, min(below + 1, int(upto[-1]) - 1)], side="right")
        low, high = values[indices]
        found.append(float(low + (high - low) * (place - below)))
    return found


def finite(value: float | None) -> float | None:
    """None for what JSON cannot say."""
    return value if value is not None and math.isfinite(value) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None where one is unknown or there is nothing to divide by."""
    return None if part is None or whole is None or not whole > 0 else finite(part / whole)


def pieces(length: int) -> Iterator[slice]:
    """A long column a piece at a time: what is made of a piece is small, whatever the column's length."""
    for start in range(0, length, _PIECE):
        yield slice(start, min(length, start + _PIECE))
