"""CallClock: one time a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.clock import Clock

if TYPE_CHECKING:
    import threading


class CallClock(Clock):
    """The clock of a traced scheduler: it stands still while a call of the scheduler lasts.

    So one time a record is enough to make the call again, however often it looks at the clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at: float | None = None

    def begin(self) -> float:
        """A call begins; returns its time."""
        self._at = self._clock.now()
        return self._at

    def end(self) -> None:
        """The call is over: time passes again."""
        self._at = None

    def now(self) -> float:
        return self._clock.now() if self._at is None else self._at

    def wait(self, until: float | None, events: threading.Event | None = None) -> None:
        self._clock.wait(until, events)


class RecordedClock(Clock):
    """The clock of a replay: it says what it is told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait(self, until: float | None, events: threading.Event | None = None) -> None:
        """Nobody waits in a replay."""
