"""WaitNotes: who waits for what, told when it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.errors import UnsupportedError
from tokenyard.trace.records import Waiting, Waits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.interfaces.scheduler import Scheduler

LINE = 16  # requests at the front of the line of which each one's reason is told


class WaitNotes:
    """Counts by reason after each `schedule`, and the line's front where something about it may have changed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._told: dict[str, str] = {}  # request id -> its reason as it was told last
        self._counts: Mapping[str, int] = {}
        self._reason: str | None = None
        self._is_stale = True

    def changed(self) -> None:
        """Somebody has come, entered or gone."""
        self._is_stale = True

    def take(self) -> Waits:
        """After a `schedule`."""
        stats = self._scheduler.stats()
        counts = stats.num_waiting_by_reason
        if not stats.num_waiting:
            self._told.clear()
            self._counts, self._is_stale = {}, False
            return Waits(num_running=stats.num_running)
        if counts != self._counts or stats.wait_reason != self._reason:
            self._counts, self._reason, self._is_stale = dict(counts), stats.wait_reason, True
        line = self._line() if self._is_stale else ()
        self._is_stale = False
        return Waits(num_running=stats.num_running, by_reason=dict(counts), line=line)

    def _line(self) -> tuple[Waiting, ...]:
        """Those of the first whose reason is another than it was told last."""
        try:
            rows = self._scheduler.waiting_snapshot(LINE)
        except UnsupportedError:
            return ()
        now = {row.request_id: str(row.wait_reason) for row in rows}
        changed = tuple(
            Waiting(row.request_id, str(row.wait_reason), row.wait_detail)
            for row in rows
            if self._told.get(row.request_id) != now[row.request_id]
        )
        self._told = now
        return changed
