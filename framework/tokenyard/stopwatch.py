"""Stopwatch: how much time is spent in each of many calls, what they call of each other taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

LabelT = TypeVar("LabelT")
P = ParamSpec("P")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class Tally:
    """One label's calls since the last `clear`."""

    self_seconds: float = 0.0
    num_calls: int = 0


class Stopwatch(Generic[LabelT]):
    """For calls of one thread; a call that raises is counted too. `now` is in seconds."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.now = now
        self.inside = 0.0  # seconds in timed calls so far, of the innermost timed call that is open
        self._tallies: dict[LabelT, Tally] = {}

    def timed(self, label: LabelT, function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        """`function`, counted under `label`."""
        tally, now = self._tally(label), self.now

        def call(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            outer, self.inside = self.inside, 0.0
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                took = now() - start
                tally.self_seconds += took - self.inside
                tally.num_calls += 1
                self.inside = outer + took

        return call

    def timer(self, label: LabelT) -> Timer:
        """To be entered around calls that are counted under `label`; not inside itself."""
        return Timer(self, self._tally(label))

    def clear(self) -> None:
        """Count from now on."""
        for tally in self._tallies.values():
            tally.self_seconds, tally.num_calls = 0.0, 0

    def tallies(self) -> dict[LabelT, Tally]:
        """Copies, in the order in which the labels were first named."""
        return {label: Tally(tally.self_seconds, tally.num_calls) for label, tally in self._tallies.items()}

    def _tally(self, label: LabelT) -> Tally:
        return self._tallies.setdefault(label, Tally())


class Timer:
    """One label of a stopwatch, as a context manager: for calls whose callee is found when it is called."""

    __slots__ = ("_outer", "_start", "_stopwatch", "_tally")

    def __init__(self, stopwatch: Stopwatch[LabelT], tally: Tally) -> None:
        self._stopwatch, self._tally = stopwatch, tally
        self._start = self._outer = 0.0

    def __enter__(self) -> None:
        self._outer, self._stopwatch.inside = self._stopwatch.inside, 0.0
        self._start = self._stopwatch.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        took = self._stopwatch.now() - self._start
        self._tally.self_seconds += took - self._stopwatch.inside
        self._tally.num_calls += 1
        self._stopwatch.inside = self._outer + took
