"""RunClock: real time, counted from the moment at which a workload begins."""

from __future__ import annotations

import time

from tokenyard.clock import MonotonicClock

_BEFORE = 1e6  # seconds: no start takes so long


class RunClock(MonotonicClock):
    """Far below zero until `begin`, so that time never goes backwards: an engine is started and warmed up before."""

    def __init__(self) -> None:
        self._origin = time.monotonic() + _BEFORE

    def begin(self) -> None:
        """It is 0 now. Once, and only while nothing waits for a time."""
        self._origin = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._origin
