"""WaitingQueue: requests in the order in which they are to be admitted."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.errors import PluginError
from tokenyard.interfaces.scheduler import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenyard.scheduler.request_state import Request

_Rank: TypeAlias = tuple[int, object, float, str]

_MOST_STALE = 64  # entries of removed requests that are kept whatever the number of live ones


class WaitingQueue:
    """A heap on (front first, key, arrival, id); removal marks an entry, which is dropped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[_Rank, int]] = []
        self._entries: dict[int, Request] = {}  # entry number -> request
        self._ranks: dict[int, _Rank] = {}  # of the same entries
        self._numbers: dict[str, int] = {}  # request id -> its live entry number
        self._next_number = 0
        self._aside: list[tuple[_Rank, int]] = []
        self._started: set[str] = set()  # ids of those that ran before

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Request]:
        """In admission order; for reports and tests, not for the step loop."""
        for _, number in sorted((*self._heap, *self._aside)):
            if number in self._entries:
                yield self._entries[number]

    @property
    def num_started(self) -> int:
        """Of those that wait, how many ran before and were preempted."""
        return len(self._started)

    def push(self, request: Request, key: object) -> None:
        """Queue by `key`."""
        self._insert(request, (1, key, request.arrival_time, request.request_id))

    def push_front(self, request: Request) -> None:
        """Queue before everything that was queued by key; requests in front stay in order of arrival."""
        self._insert(request, (0, (), request.arrival_time, request.request_id))

    def peek(self) -> Request | None:
        """The first request that was not set aside, or None."""
        while self._heap:
            request = self._entries.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def set_aside(self) -> None:
        """Skip the first request until `take_back`; it keeps its place."""
        self._aside.append(heapq.heappop(self._heap))

    def take_back(self) -> None:
        """Requests that were set aside stand where they stood."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def remove(self, request_id: str) -> None:
        """Take a request out, wherever it stands; one that does not wait is no error."""
        self._started.discard(request_id)
        number = self._numbers.pop(request_id, None)
        if number is None:
            return
        del self._entries[number], self._ranks[number]
        if len(self._heap) > 2 * len(self._ranks) + _MOST_STALE and not self._aside:
            self._rebuild()

    def _insert(self, request: Request, rank: _Rank) -> None:
        if isinstance(rank[1], float) and math.isnan(rank[1]):
            raise PluginError("the scheduling policy's key is not a number (nan), which has no place in any order")
        number = self._next_number
        try:
            heapq.heappush(self._heap, (rank, number))
        except Exception as error:
            self._rebuild()  # a push that fails half-way leaves the heap in disorder
            raise PluginError(
                f"the scheduling policy's key {rank[1]!r} cannot be compared with its other keys "
                f"({type(error).__name__}: {error}); a policy's keys must all be of one comparable type"
            ) from error
        self._next_number += 1
        self._entries[number], self._ranks[number] = request, rank
        self._numbers[request.request_id] = number
        if request.status is RequestStatus.PREEMPTED:
            self._started.add(request.request_id)

    def _rebuild(self) -> None:
        """The live entries alone."""
        self._heap = [(rank, number) for number, rank in self._ranks.items()]
        heapq.heapify(self._heap)
