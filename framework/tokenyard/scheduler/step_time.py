"""StepTime: the engine's clock, read once a call of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.clock import Clock


class StepTime:
    """Whoever asks during one call of the scheduler gets one time, so that what it decides can be replayed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now = 0.0

    def read(self) -> float:
        """Look at the clock: a call begins."""
        self._now = self._clock.now()
        return self._now

    def now(self) -> float:
        """The time of the last look, in engine-clock seconds."""
        return self._now
