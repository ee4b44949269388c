"""Histogram: counts by upper bound, for many observations of one value at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_TIME_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))  # 1, 8, 16, ... 16384
CHOICE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)
HTTP_BOUNDS = (0.1, 0.5, 1.0)


def token_count_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, ... as far as `max_model_len`."""
    bounds: list[float] = []
    unit = 1
    while True:
        for step in (1, 2, 5):
            if step * unit > max_model_len:
                return tuple(bounds) or (1.0,)
            bounds.append(float(step * unit))
        unit *= 10


class Histogram:
    """`bounds` are inclusive and rise; what is above the last one is counted too."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # each value in one of them
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """One value, seen so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        """Another one that has seen the same."""
        made = Histogram(self.bounds)
        made.counts, made.total = self.counts.copy(), self.total
        return made

    def buckets(self) -> list[tuple[float, int]]:
        """(upper bound, how many values are no higher), rising; the last bound is infinite."""
        count, found = 0, []
        for bound, own in zip((*self.bounds, float("inf")), self.counts, strict=True):
            count += own
            found.append((bound, count))
        return found
