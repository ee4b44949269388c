"""Stopwatch: how much time is spent in each of many calls, what they call of each other taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

_CALIBRATION_CALLS = 20_000


@dataclass(slots=True)
class Tally:
    """One label's calls since the last `clear`."""

    self_seconds: float = 0.0
    num_calls: int = 0


class Stopwatch:
    """For calls of one thread. `seconds_per_call` says what a timer costs; most of that is counted at the caller."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        self._inner = [0.0]  # seconds in timed calls, for each timed call that is open; first: outside of all

    def timed(self, label: str, function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        """`function`, counted under `label`."""
        tally = self._tallies.setdefault(label, Tally())
        inner = self._inner

        def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            inner.append(0.0)
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = perf_counter() - start
                tally.self_seconds += took - inner.pop()
                tally.num_calls += 1
                inner[-1] += took

        return call

    def clear(self) -> None:
        """Count from now on."""
        for tally in self._tallies.values():
            tally.self_seconds, tally.num_calls = 0.0, 0

    def tallies(self) -> dict[str, Tally]:
        """Copies, in the order in which the labels were first named."""
        return {label: Tally(tally.self_seconds, tally.num_calls) for label, tally in self._tallies.items()}


def seconds_per_call() -> float:
    """What timing a call costs, measured on one that does nothing."""

    def nothing() -> None:
        return None

    timed = Stopwatch().timed("nothing", nothing)
    return max(0.0, _seconds_of(timed) - _seconds_of(nothing)) / _CALIBRATION_CALLS


def _seconds_of(function: Callable[[], None]) -> float:
    start = perf_counter()
    for _ in range(_CALIBRATION_CALLS):
        function()
    return perf_counter() - start
