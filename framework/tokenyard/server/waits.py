"""What requests wait for, in seconds by reason."""

from __future__ import annotations

from collections.abc import Mapping

UNTOLD = "new"  # nobody has said yet; also what an engine without stats says
DEFERRED = "deferred"


class WaitClock:
    """The reason of the first in line is that of all behind it: nobody overtakes. Times are engine-clock seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # since the start, by reason
        self._reason = UNTOLD
        self._since: float | None = None

    def set_reason(self, reason: str | None, now: float) -> None:
        """What the first in line waits for from now on; None = nobody waits."""
        self._advance(now)
        self._reason = reason or UNTOLD

    def begin(self, now: float) -> Mapping[str, float]:
        """A request starts to wait; what is returned goes to `seconds`."""
        self._advance(now)
        return dict(self._seconds)

    def seconds(self, began: Mapping[str, float], length: float, now: float) -> dict[str, float]:
        """How long it waited for what, `length` seconds in all: steps tell their reasons a little late."""
        self._advance(now)
        waited = {reason: total - began.get(reason, 0.0) for reason, total in self._seconds.items()}
        over = sum(waited.values()) - length
        for reason in [self._reason, *waited]:
            if not over:
                break
            left = max(0.0, waited.get(reason, 0.0) - over)
            over -= waited.get(reason, 0.0) - left
            waited[reason] = left
        return {reason: seconds for reason, seconds in waited.items() if seconds > 0}

    def _advance(self, now: float) -> None:
        if self._since is not None and now > self._since:
            self._seconds[self._reason] = self._seconds.get(self._reason, 0.0) + now - self._since
        self._since = now if self._since is None else max(self._since, now)
