"""Deadlines: which requests are overdue, without looking at any that is not."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.scheduler.request_state import Request

_MOST_STALE = 64  # entries of ended requests that are kept without asking how many live ones there are


class Deadlines:
    """A heap; entries of requests that ended otherwise are dropped when they surface, or when they are the most."""

    def __init__(self, alive: Mapping[str, Request]) -> None:
        self._alive = alive
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0  # breaks ties: requests are not comparable

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is None or request.deadline == math.inf:
            return
        if len(self._heap) > 2 * len(self._alive) + _MOST_STALE:
            self._heap = [entry for entry in self._heap if self._is_alive(entry[2])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (request.deadline, self._num_added, request))
        self._num_added += 1

    def next_time(self) -> float | None:
        """The earliest deadline of a live request."""
        while self._heap and not self._is_alive(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_overdue(self, now: float) -> list[Request]:
        """Live requests whose deadline is `now` or earlier; they are no longer watched."""
        overdue = []
        while (deadline := self.next_time()) is not None and deadline <= now:
            overdue.append(heapq.heappop(self._heap)[2])
        return overdue

    def __len__(self) -> int:
        """Entries that are kept, those of ended requests included."""
        return len(self._heap)

    def _is_alive(self, request: Request) -> bool:
        return self._alive.get(request.request_id) is request
