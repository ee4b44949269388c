"""ShadowLine: the requests that wait, in the order in which a shadow policy would admit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.scheduler.policy_calls import PolicyCalls
    from tokenyard.scheduler.request_state import Request


class ShadowLine:
    """Who enters is taken out whoever chose it, so each choice is compared in the state that the last one led to."""

    def __init__(self, shadow: PolicyCalls) -> None:
        self._shadow = shadow
        self._queue = WaitingQueue(by_client=shadow.window_by_client)
        self._order: Sequence[Request] | None = None  # the shadow's, for the step that is being made

    def arrive(self, request: Request) -> None:
        """A request starts to wait."""
        self._queue.push(request, self._shadow.waiting_key(request))

    def come_back(self, request: Request) -> bool:
        """A request was preempted; whether it goes before everybody."""
        key = self._shadow.requeue_key(request)
        if key is None:
            self._queue.push_front(request)
        else:
            self._queue.push(request, key)
        return key is None

    @property
    def num_started(self) -> int:
        """Of those that wait, how many ran before."""
        return self._queue.num_started

    def first(self, limit: int, *, only_started: bool) -> list[Request]:
        """Up to `limit` requests, in the order of the shadow's keys."""
        return self._queue.started(limit) if only_started else self._queue.first(limit)

    def begin_admission(self) -> None:
        """Somebody may enter now: a shadow with a dynamic order is asked for it."""
        self._order = None
        if self._shadow.orders_waiting and len(self._queue):
            limit = self._shadow.waiting_window
            window = self._queue.in_turn(limit, ()) if self._shadow.window_by_client else self._queue.first(limit)
            self._order = self._shadow.waiting_order(window)

    def enter(self, request: Request) -> Request | None:
        """A request enters the batch; returns who would enter by the shadow's order, None = nobody."""
        expected = self._first()
        self._queue.remove(request.request_id)
        if self._order is not None:
            self._order = [one for one in self._order if one is not request]
        return expected

    def leave(self, request: Request) -> None:
        """A request has ended, wherever it was."""
        self._queue.remove(request.request_id)

    def _first(self) -> Request | None:
        if self._order is None:
            return self._queue.at(0)
        return self._order[0] if self._order else None
