"""Timelines of the last requests: what happened to each and when, without its text."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenyard.engine.open_requests import OpenRequest

MAX_EVENTS = 256  # of one request; what comes after them is counted
_MAX_BYTES = 32 * 2**20  # of all timelines together
_BYTES_OF_REQUEST, _BYTES_OF_EVENT = 1000, 150  # roughly, with what Python needs for itself


class TimelineEvent(NamedTuple):
    """Something that happened to a choice of a request."""

    seconds: float  # since the request's arrival
    event: str  # queued, scheduled, chunk, preempted, resumed, deferred, released, first_token, end
    choice: int  # its index
    num_tokens: int | None = None
    reason: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Timeline:
    """One request: one prompt with its choices. Seconds are since its arrival."""

    request_id: str  # as it stands in the answer
    client_label: str | None  # what its client calls that
    number: int  # which of the HTTP request's prompts, from 0
    num_prompt_tokens: int
    n: int
    max_tokens: int | None
    arrived_at: float  # engine-clock seconds
    arrived_on: float = field(default_factory=time.time)  # Unix seconds
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    waited: dict[str, float] = field(default_factory=dict)  # seconds by what it waited for, of all its choices
    finish_reasons: list[str] = field(default_factory=list)  # by choice, once all have ended
    error: str | None = None
    events: list[TimelineEvent] = field(default_factory=list)
    num_left_out: int = 0  # events that there was no room for
    is_kept: bool = False  # by Timelines

    @classmethod
    def of(cls, request: OpenRequest, *, client_label: str | None, number: int, arrived_at: float) -> Timeline:
        """A request that has just arrived."""
        return cls(
            request_id=request.label,
            client_label=client_label,
            number=number,
            num_prompt_tokens=len(request.prompt.token_ids),
            n=request.params.n,
            max_tokens=request.params.max_tokens,
            arrived_at=arrived_at,
        )

    @property
    def is_ended(self) -> bool:
        return bool(self.finish_reasons) or self.error is not None

    def add(self, at: float, event: str, choice: int, num_tokens: int | None = None, reason: str | None = None) -> None:
        """Something happened at `at`, in engine-clock seconds."""
        if len(self.events) < MAX_EVENTS or event == "end":
            self.events.append(TimelineEvent(at - self.arrived_at, event, choice, num_tokens, reason))
        else:
            self.num_left_out += 1

    def wait(self, seconds: Mapping[str, float]) -> None:
        """A choice has waited."""
        for reason, more in seconds.items():
            self.waited[reason] = self.waited.get(reason, 0.0) + more

    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return _BYTES_OF_REQUEST + _BYTES_OF_EVENT * len(self.events)


class Timelines:
    """Keeps the timelines of the last `size` requests, fewer where they are long; for one thread at a time."""

    def __init__(self, size: int, max_bytes: int = _MAX_BYTES) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, Timeline] = OrderedDict()  # by number of arrival
        self._next = 0
        self._by_id: dict[str, list[int]] = {}  # the same, by request id and by the client's label
        self._num_bytes = 0  # of those that have ended

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Timeline]:
        """The newest first."""
        return iter(reversed(self._kept.values()))

    def find(self, request_id: str) -> list[Timeline]:
        """Those of an HTTP request: by the id in its answer, by X-Request-Id as it was echoed or given."""
        return [self._kept[number] for number in self._by_id.get(request_id, ())]

    def newest(self, request_id: str) -> Timeline | None:
        """The last of those that `find` returns."""
        numbers = self._by_id.get(request_id)
        return self._kept[numbers[-1]] if numbers else None

    def add(self, timeline: Timeline) -> None:
        """A request has arrived; the oldest may go for it."""
        if self._size <= 0:
            return
        self._kept[self._next] = timeline
        timeline.is_kept = True
        for name in _names(timeline):
            self._by_id.setdefault(name, []).append(self._next)
        self._next += 1
        while len(self._kept) > self._size:
            self._drop()

    def ended(self, timeline: Timeline) -> None:
        """Its events are all there; the oldest ones may go for them."""
        if timeline.is_kept:
            self._num_bytes += timeline.num_bytes()
        while self._num_bytes > self._max_bytes and self._kept:
            self._drop()

    def _drop(self) -> None:
        """Forget the oldest."""
        number, timeline = self._kept.popitem(last=False)
        timeline.is_kept = False
        if timeline.is_ended:
            self._num_bytes -= timeline.num_bytes()
        for name in _names(timeline):
            numbers = self._by_id[name]
            numbers.remove(number)
            if not numbers:
                del self._by_id[name]


def _names(timeline: Timeline) -> set[str]:
    name = timeline.request_id
    names = {name, name.removeprefix("chatcmpl-"), name.removeprefix("cmpl-")}
    return names if timeline.client_label is None else names | {timeline.client_label}
