"""ClientCounters: what each client was served, for policies that share an engine between clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush, heapreplace

_MOST_CLIENTS = 10_000  # beyond, those are forgotten that would be lifted anyway, each time there are twice as many


class ClientCounters(dict[str | None, float]):
    """What clients were served, for a policy that shares an engine between them (since API 1.7).

    Counters that only grow, and a floor to which those are lifted that join the line: a client's start. Neither
    a joining client nor a question costs a look at all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.floor = 0.0
        self._limit = _MOST_CLIENTS
        self._joined: list[tuple[float, bool, str | None]] = []  # a heap; the flag keeps None from being compared

    def __missing__(self, client: str | None) -> float:
        return self.floor

    def join(self, clients: Iterable[str | None], waiting: Collection[str | None]) -> None:
        """These come into a line in which so far are those `waiting`."""
        self._forget(waiting)
        for client in clients:
            self[client] = max(self[client], self.floor)

    def queue(self, clients: Iterable[str | None]) -> None:
        """These are in line from now on, for `smallest`."""
        for client in clients:
            heappush(self._joined, self._entry(client))

    def smallest(self, waiting: Collection[str | None], otherwise: str | None) -> float:
        """Of those in line, all of which were queued; while nobody is, that of `otherwise`.

        What the heap has of a client is never too large, so only its first entry has to be right: it is moved down
        until it is, or taken out where its client has left.
        """
        heap = self._joined
        if len(heap) > 2 * len(waiting) + _MOST_CLIENTS:
            heap[:] = map(self._entry, waiting)
            heapify(heap)
        while heap:
            counter, _, client = heap[0]
            if client not in waiting:
                heappop(heap)
            elif counter < self[client]:
                heapreplace(heap, self._entry(client))
            else:
                return counter
        return self[otherwise]

    def _forget(self, waiting: Collection[str | None]) -> None:
        if len(self) <= self._limit:
            return
        for client in [one for one, counter in self.items() if counter <= self.floor and one not in waiting]:
            del self[client]
        self._limit = max(_MOST_CLIENTS, 2 * len(self))

    def _entry(self, client: str | None) -> tuple[float, bool, str | None]:
        return self[client], client is None, client
