"""WaitingQueue: requests in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import insort
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.errors import PluginError
from tokenyard.interfaces.scheduler import RequestStatus
from tokenyard.scheduler.client_lines import ClientLines, Rank, index_of
from tokenyard.scheduler.plugin_words import shown

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from tokenyard.scheduler.request_state import Request

_Entry: TypeAlias = "tuple[Rank, Request]"

_MOST_PASSED = 64  # entries before the head that are kept without asking how many there are behind it


class WaitingQueue:
    """A list sorted by (front first, key, arrival, id): its first requests are at hand, however long it is.

    With `by_client` the first requests of each client are at hand too.
    """

    def __init__(self, *, by_client: bool = False) -> None:
        self._line: list[_Entry] = []  # what is before the head has left
        self._head = 0
        self._ranks: dict[str, Rank] = {}  # by request id
        self._started: set[str] = set()  # ids of those that ran before
        self.is_paused = False  # nobody but those may leave it for the batch
        self.num_by_client: dict[str | None, int] = {}  # of clients that have some; None = those without an id
        self._clients = ClientLines() if by_client else None

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Request]:
        """In order; the line must not change meanwhile."""
        return (self._line[index][1] for index in range(self._head, len(self._line)))

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

    def at(self, position: int) -> Request | None:
        """The request at this position, 0 = the first, or None behind the last."""
        index = self._head + position
        return self._line[index][1] if index < len(self._line) else None

    def first(self, limit: int, start: int = 0) -> list[Request]:
        """Up to `limit` requests from position `start` on."""
        begin = self._head + start
        return [request for _, request in self._line[begin : begin + limit]]

    def started(self, limit: int) -> list[Request]:
        """The first requests of those that ran before."""
        if not self._started:
            return []
        return list(islice((request for request in self if request.request_id in self._started), limit))

    def in_turn(self, limit: int, passed: Container[str]) -> list[Request]:
        """Up to `limit` requests, the first of each client, then the second of each, ...; without those `passed`."""
        if self._clients is None:
            raise RuntimeError("this queue was not made by_client")
        return self._clients.in_turn(limit, passed)

    def remove(self, request_id: str) -> None:
        """Take a request out, wherever it stands; one that does not wait is no error."""
        rank = self._ranks.pop(request_id, None)
        if rank is None:
            return
        self._started.discard(request_id)
        index = index_of(rank, self._line, self._head)
        self._leave(rank, self._line[index][1].client_id)
        if index > self._head:
            del self._line[index]
            return
        self._head += 1
        if self._head > _MOST_PASSED and 2 * self._head > len(self._line):
            del self._line[: self._head]
            self._head = 0

    def _leave(self, rank: Rank, client: str | None) -> None:
        if self._clients is not None:
            self._clients.remove(rank, client)
        num_left = self.num_by_client[client] - 1
        if num_left:
            self.num_by_client[client] = num_left
        else:
            del self.num_by_client[client]

    def _insert(self, request: Request, rank: Rank) -> None:
        try:
            if _has_nan(rank[1]):
                raise PluginError("the scheduling policy's key is not a number (nan), which has no place in any order")
            insort(self._line, (rank, request), lo=self._head)
            if self._clients is not None:
                self._insert_by_client(self._clients, rank, request)
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"the scheduling policy's key {shown(rank[1])} cannot be compared with its other keys "
                f"({type(error).__name__}: {shown(error, as_text=True)}); a policy's keys must all be of one "
                "comparable type"
            ) from error
        client = request.client_id
        self.num_by_client[client] = self.num_by_client.get(client, 0) + 1
        self._ranks[request.request_id] = rank
        if request.status is RequestStatus.PREEMPTED:
            self._started.add(request.request_id)

    def _insert_by_client(self, clients: ClientLines, rank: Rank, request: Request) -> None:
        try:
            clients.insert(rank, request)
        except BaseException:
            del self._line[index_of(rank, self._line, self._head)]
            raise


def _has_nan(key: object) -> bool:
    if isinstance(key, tuple):
        return any(_has_nan(one) for one in key)
    return isinstance(key, Real) and bool(key != key)
