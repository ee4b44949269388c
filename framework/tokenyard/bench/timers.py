"""What a timer costs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from tokenyard.stopwatch import Stopwatch

_CALIBRATION_CALLS = 20_000


def seconds_per_call() -> float:
    """What timing a call costs, measured on one that does nothing. Most of that is counted at the caller."""

    def nothing() -> None:
        return None

    timed = Stopwatch[str]().timed("nothing", nothing)
    return max(0.0, _seconds_of(timed) - _seconds_of(nothing)) / _CALIBRATION_CALLS


def _seconds_of(function: Callable[[], None]) -> float:
    start = perf_counter()
    for _ in range(_CALIBRATION_CALLS):
        function()
    return perf_counter() - start
