"""Time, as the engine sees it. Only the driver waits; policies and executors never read another clock."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod


class Clock(ABC):
    """Engine time in seconds from an arbitrary start; never goes backwards."""

    @abstractmethod
    def now(self) -> float:
        """The current time in seconds."""

    @abstractmethod
    def wait(self, until: float | None, events: threading.Event | None = None) -> None:
        """Return once `now() >= until` or `events` is set; `until=None` waits for the event alone.

        Waiting for neither would last for ever and raises ValueError.
        """


class MonotonicClock(Clock):
    """Real time, from time.monotonic()."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float | None, events: threading.Event | None = None) -> None:
        if until is None and events is None:
            raise ValueError("Clock.wait needs a time or an event")
        timeout = None if until is None else max(0.0, until - self.now())
        if events is not None:
            events.wait(timeout)
        elif timeout:
            time.sleep(timeout)


class VirtualClock(Clock):
    """Simulated time: waiting costs nothing and jumps straight to the awaited moment."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait(self, until: float | None, events: threading.Event | None = None) -> None:
        if events is not None and events.is_set():
            return
        if until is None:
            raise ValueError("on a virtual clock nothing happens by itself: Clock.wait needs a time")
        self._now = max(self._now, until)
