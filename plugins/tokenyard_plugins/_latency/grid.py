"""Measured times on lines and grids: linear between the points, in proportion beyond the last one.

Below the first point of an axis a time stays what it is there.
"""

from __future__ import annotations

from bisect import bisect_right
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]


MOST_POINTS = 1 << 20


class Line:
    """Seconds by a count. It never falls: a count that was measured slower than a larger one is as slow as it."""

    def __init__(self, points: Mapping[int, float]) -> None:
        counts = sorted(points)
        times = np.interp(np.arange(counts[-1] + 1), counts, [points[count] for count in counts])
        self._times: list[float] = np.maximum.accumulate(times).tolist()
        self._last = counts[-1]

    def at(self, count: int) -> float:
        if count <= self._last:
            return self._times[count]
        return self._times[-1] * (count / self._last)


class Grid:
    """Seconds at points of N axes, inside them: what lies outside is moved to the edge."""

    def __init__(self, axes: Sequence[Sequence[float]], values: Array) -> None:
        self.axes = tuple(tuple(axis) for axis in axes)
        self.last = tuple(axis[-1] for axis in self.axes)
        strides = [int(np.prod(values.shape[at + 1 :])) for at in range(values.ndim)]
        self._steps = tuple(zip(self.axes, strides, strict=True))
        self._values: list[float] = values.ravel().tolist()

    def at(self, *point: float) -> float:
        """Once for each step of a simulation: plain numbers are quicker here than arrays of 16."""
        corners, shares = [0], []  # of the cell around the point, and how far into it on each axis
        for (axis, stride), value in zip(self._steps, point, strict=True):
            low, share = _cell(axis, value)
            corners = [at + low * stride for at in corners]
            if share:
                corners += [at + stride for at in corners]
                shares.append(share)
        times = [self._values[at] for at in corners]
        for share in reversed(shares):
            half = len(times) // 2
            times = [low + (high - low) * share for low, high in zip(times[:half], times[half:], strict=True)]
        return times[0]


def beyond(value: float, last: float) -> float:
    """By how much more than at the edge a point outside of an axis counts; 1 inside."""
    return value / last if value > last > 0 else 1.0


def complete(values: Array, axes: Sequence[Sequence[float]]) -> Array:
    """The values with those that are missing (NaN) filled: linear between known ones on an axis, the last axis first.

    Where no axis has one on both sides, the nearest on an axis.
    """
    for reaches_out in (False, True):
        for at in reversed(range(values.ndim)):
            lines = np.moveaxis(values, at, -1)
            filled = lines.reshape(-1, lines.shape[-1]).copy()
            axis = np.asarray(axes[at], dtype=np.float64)
            for which in np.flatnonzero(np.isnan(filled).any(axis=1)):
                _fill(filled[which], axis, reaches_out=reaches_out)
            values = np.moveaxis(filled.reshape(lines.shape), -1, at)
    return values


def spread(points: Mapping[tuple[float, ...], float], axes: Sequence[Sequence[float]], path: Path) -> Array:
    """Points on a grid; NaN where there is none. Raises ConfigError where it would be too large, naming the file."""
    if prod(len(axis) for axis in axes) > MOST_POINTS:
        raise ConfigError(
            f"{path}: its rows have so many different values that their grid has over {MOST_POINTS} points"
        )
    values = np.full([len(axis) for axis in axes], np.nan)
    index = [{value: at for at, value in enumerate(axis)} for axis in axes]
    for point, value in points.items():
        values[tuple(places[at] for places, at in zip(index, point, strict=True))] = value
    return values


def _cell(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """The point below, and how far towards the next one it is."""
    if value <= axis[0]:
        return 0, 0.0
    low = bisect_right(axis, value) - 1
    if low == len(axis) - 1:
        return low, 0.0
    return low, (value - axis[low]) / (axis[low + 1] - axis[low])


def _fill(line: Array, axis: Array, *, reaches_out: bool) -> None:
    known = np.flatnonzero(~np.isnan(line))
    if not len(known):
        return
    missing = np.isnan(line)
    if not reaches_out:
        missing[: known[0]] = missing[known[-1] + 1 :] = False
    line[missing] = np.interp(axis[missing], axis[known], line[known])
