"""Arrival times: a mean rate, how bursty it is, and how the rate changes over time."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tokenyard_plugins._generated.draws import CHUNK

if TYPE_CHECKING:
    from tokenyard_plugins._generated.arrival_options import ArrivalOptions, ProfileOptions
    from tokenyard_plugins._generated.draws import Floats


def arrival_times(options: ArrivalOptions, rng: np.random.Generator, start: float = 0.0) -> Iterator[float]:
    """Without end, from `start` on: a renewal process whose clock runs as fast as the rate is.

    The intervals are of a Gamma distribution whose shape is `burstiness`, so their coefficient of variation is
    1 / sqrt(burstiness): 1 is a Poisson process, less is burstier, infinity is even.
    """
    curve, expected = _curve(options.rate, options.profile), 0.0  # arrivals that are expected until then
    latest = start
    while True:
        sums = expected + np.cumsum(_intervals(options.burstiness, rng))
        expected = float(sums[-1])
        times = np.maximum.accumulate(np.maximum(start + curve.times(sums), latest))  # whatever rounding does
        latest = float(times[-1])
        yield from times.tolist()


def _intervals(burstiness: float, rng: np.random.Generator) -> Floats:
    """[CHUNK] of mean 1."""
    if math.isinf(burstiness):
        return np.ones(CHUNK)
    return rng.gamma(burstiness, 1 / burstiness, size=CHUNK)


class _Curve(ABC):
    """How many arrivals are expected until when, the other way round."""

    @abstractmethod
    def times(self, expected: Floats) -> Floats:
        """[n] the seconds after which so many are expected."""


class _Steady(_Curve):
    def __init__(self, rate: float) -> None:
        self._rate = rate

    def times(self, expected: Floats) -> Floats:
        return expected / self._rate


class _OnOff(_Curve):
    def __init__(self, rate: float, on: float, off: float) -> None:
        self._rate, self._on, self._off = rate, on, off

    def times(self, expected: Floats) -> Floats:
        seconds_on = expected / self._rate
        return seconds_on + np.floor(seconds_on / self._on) * self._off


class _Ramp(_Curve):
    """Expected are rate * t + growth * t^2 / 2 until the ramp's end, and then as many a second as the final rate is."""

    def __init__(self, rate: float, final_rate: float, seconds: float) -> None:
        self._rate, self._final_rate, self._seconds = rate, final_rate, seconds
        self._growth = (final_rate - rate) / seconds
        self._at_end = (rate + final_rate) / 2 * seconds

    def times(self, expected: Floats) -> Floats:
        inside = np.minimum(expected, self._at_end)
        root = np.sqrt(np.maximum(self._rate**2 + 2 * self._growth * inside, 0.0))
        after = np.maximum(expected - self._at_end, 0.0) / self._final_rate
        return 2 * inside / (self._rate + root) + after


def _curve(rate: float, profile: ProfileOptions) -> _Curve:
    if profile.on_time is not None and profile.off_time is not None:
        return _OnOff(rate, profile.on_time, profile.off_time)
    if profile.final_rate is not None and profile.ramp_time is not None:
        return _Ramp(rate, profile.final_rate, profile.ramp_time)
    return _Steady(rate)
