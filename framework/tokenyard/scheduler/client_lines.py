"""ClientLines: the waiting requests of each client, so that no client's many hide the others'."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from tokenyard.scheduler.request_state import Request

Rank: TypeAlias = tuple[int, object, float, str]
"""A place in the line: (front first, key, arrival, id). No two requests that wait have the same."""


def index_of(rank: Rank, entries: Sequence[tuple[Rank, Any]], start: int = 0) -> int:
    """Where the entry with this very rank is, from `start` on.

    A policy's keys are its own objects: where they no longer compare as they did, it is looked for one by one.
    """
    if start < len(entries) and entries[start][0] is rank:  # mostly the first one leaves
        return start
    try:
        index = bisect_left(entries, (rank,), lo=start)
    except (Exception, SystemExit):
        index = len(entries)
    if index < len(entries) and entries[index][0] is rank:
        return index
    return next(index for index in range(start, len(entries)) if entries[index][0] is rank)


class ClientLines:
    """A line for each client in order of rank, and the clients in order of their first request's."""

    def __init__(self) -> None:
        self._lines: dict[str | None, list[tuple[Rank, Request]]] = {}
        self._heads: list[tuple[Rank, str | None]] = []

    def insert(self, rank: Rank, request: Request) -> None:
        """Raises what comparing two ranks raises, having changed nothing."""
        client = request.client_id
        line = self._lines.get(client)
        if line is None:
            insort(self._heads, (rank, client))
            self._lines[client] = [(rank, request)]
            return
        first = line[0][0]
        insort(line, (rank, request))
        if line[0][0] is not first:
            try:
                self._replace_head(first, line[0][0], client)
            except BaseException:
                del line[0]
                raise

    def remove(self, rank: Rank, client: str | None) -> None:
        """Take out who has this rank."""
        line = self._lines[client]
        first = line[0][0]
        del line[index_of(rank, line)]
        if not line:
            del self._lines[client]
        if not line or line[0][0] is not first:
            self._replace_head(first, line[0][0] if line else None, client)

    def in_turn(self, limit: int, passed: Container[str]) -> list[Request]:
        """Up to `limit` requests, the first of each client, then the second of each, ...; without those `passed`."""
        if not passed and len(self._lines) == 1:
            (line,) = self._lines.values()
            return [request for _, request in line[:limit]]
        heads = self._heads if passed else self._heads[:limit]
        if not passed and len(heads) == limit:
            return [self._lines[client][0][1] for _, client in heads]
        lines = [
            (request for _, request in self._lines[client] if request.request_id not in passed) for _, client in heads
        ]
        rounds = chain.from_iterable(zip_longest(*lines))
        return list(islice((request for request in rounds if request is not None), limit))

    def _replace_head(self, old: Rank, new: Rank | None, client: str | None) -> None:
        if new is not None:
            insort(self._heads, (new, client))
        del self._heads[index_of(old, self._heads)]
