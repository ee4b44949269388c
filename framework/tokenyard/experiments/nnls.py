"""Least squares with coefficients that are at least 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_TOLERANCE = 1e-10


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """x >= 0, [columns], that minimises |matrix @ x - target|.

    The active-set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23. Columns are scaled to
    length 1 for it, so that they may be of any size.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    columns = matrix / scale
    found = np.zeros(columns.shape[1])
    is_free = np.zeros(columns.shape[1], dtype=bool)
    tolerance = _TOLERANCE * max(1.0, float(np.abs(columns.T @ target).max(initial=0.0)))
    for _ in range(3 * columns.shape[1]):
        gradient = columns.T @ (target - columns @ found)
        gradient[is_free] = 0.0
        if is_free.all() or gradient.max() <= tolerance:
            break
        is_free[int(gradient.argmax())] = True
        found = _descend(columns, target, found, is_free)
    result: Floats = found / scale
    return result


def _descend(columns: Floats, target: Floats, found: Floats, is_free: NDArray[np.bool_]) -> Floats:
    """The best over the free coefficients; those that would become negative are set to 0 and freed no more."""
    while True:
        best = np.zeros_like(found)
        best[is_free] = np.linalg.lstsq(columns[:, is_free], target, rcond=None)[0]
        is_bad = is_free & (best <= 0)
        if not is_bad.any():
            return best
        steps = found[is_bad] / np.maximum(found[is_bad] - best[is_bad], 1e-300)
        found = found + float(steps.min()) * (best - found)
        is_free &= found > 1e-14
        found[~is_free] = 0.0
        if not is_free.any():
            return found
