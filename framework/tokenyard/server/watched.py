"""Requests as those who watch over them see them, between their arrival and their end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.engine.open_requests import Choice, OpenRequest
    from tokenyard.server.request_context import RequestContext
    from tokenyard.server.timeline import Timeline


@dataclass(slots=True, eq=False, kw_only=True)
class WatchedChoice:
    """One choice: a request of its own for the engine. Times are engine-clock seconds."""

    owner: WatchedRequest
    choice: Choice
    queued_at: float  # it arrived, or was preempted last
    began_to_wait: Mapping[str, float]  # see WaitClock
    num_places: int = 0  # times that it got a place in the batch, less those that it lost one, in whatever order told
    deferred_at: float | None = None  # since when the policy holds it back
    scheduled_at: float | None = None  # it entered the batch, the last time before its first token
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has a place in the batch."""
        return self.num_places > 0

    @property
    def is_deferred(self) -> bool:
        """Whether the policy holds it back."""
        return self.deferred_at is not None and not self.is_running


@dataclass(slots=True, eq=False, kw_only=True)
class WatchedRequest:
    """One prompt with its choices."""

    request: OpenRequest
    context: RequestContext | None
    timeline: Timeline
    arrived_at: float  # engine-clock seconds, before its prompt was tokenized
    choices: list[WatchedChoice] = field(default_factory=list)  # by index
    has_started: bool = False  # one of them has

    @property
    def first_token_at(self) -> float | None:
        """Of the choice that was first."""
        return min((one.first_token_at for one in self.choices if one.first_token_at is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """How it went."""

    watched: WatchedRequest
    ended_at: float  # engine-clock seconds
    finish_reasons: tuple[str, ...]  # by choice
    num_tokens: tuple[int, ...]  # generated, by choice

    @property
    def seconds(self) -> float:
        return self.ended_at - self.watched.arrived_at
