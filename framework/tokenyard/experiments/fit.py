"""Fits a latency model to measured steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.errors import UserError
from tokenyard.experiments.nnls import nonnegative_least_squares
from tokenyard.latency_fit import Errors, Fit, LatencyFit, pairs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.interfaces.latency import StepLoad

    Floats = NDArray[np.float64]

_ROUNDS = 30  # of reweighting
# Robust standard deviations within which an error counts in full. Disturbances only ever make steps longer: with a
# smaller width the fit would say less than the steps take together, which is what a simulation adds up.
_HUBER = 3.0
_LEAST_PER_STEP = 1e-6  # seconds


class MeasuredStep(NamedTuple):
    """A step of a real engine."""

    load: StepLoad
    seconds: float  # from the end of the one before to its own end, the loop's own work included


def fit_steps(steps: Sequence[MeasuredStep]) -> Fit:
    """Nonnegative least squares of relative errors, with Huber's weights, so that a few disturbed steps change little.

    Raises UserError where there are no steps.
    """
    if not steps:
        raise UserError("no step was measured; give more --seconds")
    knots = _knots(max(step.load.num_tokens for step in steps))
    seconds = np.array([step.seconds for step in steps])
    found = _robust(np.array([_row(step.load, knots) for step in steps]), seconds)
    slopes = found[1 : 1 + len(knots)].tolist()
    decode, prefill, context, pair = found[1 + len(knots) :].tolist()
    return Fit(
        per_step=max(float(found[0]), _LEAST_PER_STEP),
        token_knots=tuple(knots),
        per_token=tuple(slopes),
        per_decode=decode,
        per_prefill=prefill,
        per_decode_context_token=context,
        per_prefill_pair=pair,
    )


def errors_of(fit: Fit, steps: Sequence[MeasuredStep]) -> Errors:
    """Raises UserError where there are no steps."""
    if not steps:
        raise UserError("no step was left to check the fit with; give more --seconds")
    model = LatencyFit(fit)
    told = np.array([model.seconds(step.load) for step in steps])
    measured = np.array([step.seconds for step in steps])
    off = np.abs(told - measured) / measured
    return Errors(
        num_steps=len(steps),
        mean=float(off.mean()),
        median=float(np.median(off)),
        total=float(told.sum() / measured.sum() - 1),
    )


def _knots(most_tokens: int) -> list[int]:
    """0, 1, 4, 16, ... at most half of the most: each slope is measured over a stretch as long as all before it."""
    knots, knot = [0], 1
    while knot <= most_tokens // 2:
        knots.append(knot)
        knot *= 4
    return knots


def _row(load: StepLoad, knots: Sequence[int]) -> list[float]:
    """What each coefficient is multiplied with, in the order of `Fit`."""
    ends = (*knots[1:], load.num_tokens)
    spans = [
        float(max(0, min(load.num_tokens, max(end, begin)) - begin)) for begin, end in zip(knots, ends, strict=True)
    ]
    rest = (load.num_decodes, load.num_prefills, load.num_decode_context_tokens, pairs_of(load))
    return [1.0, *spans, *map(float, rest)]


def _robust(rows: Floats, seconds: Floats) -> Floats:
    """Iteratively reweighted least squares (Huber, Robust Estimation of a Location Parameter, 1964).

    Errors are shares of what the fit says, not of what was measured: those would favour steps quick by chance.
    """
    found = nonnegative_least_squares(rows / seconds[:, None], np.ones(len(seconds)))
    for _ in range(_ROUNDS):
        told = np.maximum(rows @ found, 1e-9)
        left = np.abs(seconds / told - 1)
        width = _HUBER * max(1.4826 * float(np.median(left)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, width / np.maximum(left, 1e-12))) / told
        before, found = found, nonnegative_least_squares(rows * weights[:, None], seconds * weights)
        if np.allclose(before, found, rtol=1e-4, atol=0):
            break
    return found
