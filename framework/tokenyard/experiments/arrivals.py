"""WorkloadArrivals: a workload as a driver takes it, request by request, at its own times or in a closed loop."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tokenyard.errors import UserError
from tokenyard.experiments.checked_workload import CheckedWorkload

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from tokenyard.config import WorkloadConfig
    from tokenyard.interfaces.workload import Workload, WorkloadRequest

SentT = TypeVar("SentT")

MOST_SECONDS = 1e10  # three centuries: later than that a time and the end of a short step are one number


class Arrived(NamedTuple):
    """A request that has been sent: its number, counted from 0 in order of arrival, and when that was."""

    number: int
    request: WorkloadRequest
    arrival: float  # engine-clock seconds

    @property
    def request_id(self) -> str:
        """The number, such that ids in order of text are in order of arrival: they break an engine's last ties."""
        return f"{self.number:010d}"


class WorkloadArrivals(Generic[SentT]):
    """`make` turns a request into what is sent, as it arrives; with the engine's own this is what `drive` takes.

    Whoever drives the engine calls `ended` for each request that has ended: a closed loop sends the next one then, and
    a workload may have follow-ups. What arrives at one time comes in the order in which it became known.
    """

    event: threading.Event | None = None

    def __init__(self, workload: Workload, config: WorkloadConfig, make: Callable[[Arrived], SentT]) -> None:
        self._workload = CheckedWorkload(workload, config.name)
        self._scale = config.time_scale
        self._coming = itertools.islice(self._workload.requests(), config.limit)
        self._left = config.limit
        self._make = make
        self._follow_ups: list[tuple[float, int, WorkloadRequest]] = []  # a heap
        self._num_follow_ups = 0
        self._num_sent = 0
        self._open: dict[int, WorkloadRequest] = {}
        self._mode = config.arrivals
        self._next: tuple[float, WorkloadRequest] | None = None
        if self._mode in ("sequential", "closed_loop"):
            for _ in range(config.concurrency or 1):
                self._send_next_at(0.0)
        else:
            self._next = self._draw()

    @property
    def num_sent(self) -> int:
        """Requests so far."""
        return self._num_sent

    @property
    def num_open(self) -> int:
        """Those of them that have not ended."""
        return len(self._open)

    def due(self, now: float) -> Sequence[SentT]:
        arrived: list[SentT] = []
        while (moment := self.next_time()) is not None and moment <= now:
            arrived.append(self._make(self._take(moment)))
        return arrived

    def next_time(self) -> float | None:
        if self._is_used_up:
            return None
        moment = None if self._next is None else self._next[0]
        if not self._follow_ups:
            return moment
        follow_up = self._follow_ups[0][0]
        return follow_up if moment is None else min(moment, follow_up)

    def is_exhausted(self) -> bool:
        return self._is_used_up or (self._next is None and not self._follow_ups)

    def ended(self, number: int, end: float) -> None:
        """A request has ended, however it did."""
        request = self._open.pop(number)
        for follow_up in self._workload.follow_ups(request, end, number):
            self._push(_in_time(follow_up.arrival), follow_up)
        if self._mode in ("sequential", "closed_loop"):
            self._send_next_at(end)

    @property
    def _is_used_up(self) -> bool:
        return self._left is not None and self._num_sent >= self._left

    def _take(self, moment: float) -> Arrived:
        if self._next is not None and self._next[0] == moment:
            request = self._next[1]
            self._next = self._draw()
        else:
            _, _, request = heapq.heappop(self._follow_ups)
        number = self._num_sent
        self._num_sent += 1
        self._open[number] = request
        return Arrived(number, request, moment)

    def _draw(self) -> tuple[float, WorkloadRequest] | None:
        """The next one of an open loop."""
        request = next(self._coming, None)
        if request is None:
            return None
        return (0.0 if self._mode == "all_at_once" else _in_time(request.arrival * self._scale)), request

    def _send_next_at(self, moment: float) -> None:
        """The next one of a closed loop."""
        request = next(self._coming, None)
        if request is not None:
            self._push(moment, request)

    def _push(self, moment: float, request: WorkloadRequest) -> None:
        heapq.heappush(self._follow_ups, (moment, self._num_follow_ups, request))
        self._num_follow_ups += 1


def _in_time(moment: float) -> float:
    """`moment`, at which a request is to arrive."""
    if moment > MOST_SECONDS:
        raise UserError(
            f"a request of the workload arrives at {moment:g} s, and times are at most {MOST_SECONDS:g} s; lower "
            "workload.time_scale, or ask for a higher rate or fewer requests"
        )
    return moment
