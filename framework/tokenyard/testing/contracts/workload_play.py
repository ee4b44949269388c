"""Plays a workload without an engine: each request ends some time after it came, and its follow-ups come."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.testing.contracts.base import seeded

if TYPE_CHECKING:
    from tokenyard.interfaces.workload import Workload, WorkloadRequest

_LONGEST = 30.0  # seconds that a request takes


class Played(NamedTuple):
    """A request, when it ended, and what came because of that."""

    request: WorkloadRequest
    end: float
    follow_ups: Sequence[WorkloadRequest]


def play(workload: Workload, most: int, *, is_eager: bool = False) -> Iterator[Played]:
    """In order of their ends, of at most `most` that come by themselves; nobody waits for anybody.

    `is_eager` takes all that come by themselves before the first one ends; otherwise each is taken when it comes.
    """
    service, numbers = seeded(0), itertools.count()
    running: list[tuple[float, int, WorkloadRequest]] = []  # a heap by end
    coming: Iterator[WorkloadRequest] = itertools.islice(workload.requests(), most)
    if is_eager:
        coming = iter(list(coming))
    following = next(coming, None)
    while running or following is not None:
        while following is not None and (not running or following.arrival <= running[0][0]):
            heapq.heappush(running, (following.arrival + service.uniform(0, _LONGEST), next(numbers), following))
            following = next(coming, None)
        end, _, request = heapq.heappop(running)
        follow_ups = tuple(workload.follow_ups(request, end))
        for one in follow_ups:
            heapq.heappush(running, (one.arrival + service.uniform(0, _LONGEST), next(numbers), one))
        yield Played(request, end, follow_ups)
