"""GET /debug/requests and /debug/requests/{id}: what became of the last requests, without their text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request, Response

from tokenyard.server.json_answer import json_answer
from tokenyard.server.service import service_of

if TYPE_CHECKING:
    from tokenyard.server.timeline import Timeline

router = APIRouter(prefix="/debug/requests", tags=["debug"])

_MISSING: dict[int | str, dict[str, object]] = {404: {"description": "No request of this id is known any more."}}


class EventBody(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a choice."""

    seconds: float  # since the request's arrival
    event: str  # queued, scheduled, chunk, preempted, resumed, deferred, released, first_token, end
    choice: int
    num_tokens: int | None = None  # chunk: computed; scheduled, resumed: cached; preempted: lost; end: generated
    reason: str | None = None  # of preempted, deferred and end


class TimelineBody(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of an HTTP request, with its choices."""

    id: str  # as it stands in the answer
    client_label: str | None  # its X-Request-Id
    prompt: int  # its number among the request's prompts
    state: str  # waiting, running or ended
    created: float  # Unix seconds
    n: int
    max_tokens: int | None
    usage: UsageBody
    num_preemptions: int
    waited: dict[str, float]  # seconds by reason, of all choices together
    finish_reasons: list[str]  # by choice, once all have ended
    error: str | None
    events: list[EventBody]  # by time
    num_events_left_out: int


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens; `completion_tokens` once it has ended."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class TimelinesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of one HTTP request: one for each prompt."""

    id: str
    requests: list[TimelineBody]


class SummaryBody(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list."""

    id: str
    client_label: str | None
    prompt: int
    state: str
    created: float


class SummariesBody(msgspec.Struct, frozen=True, kw_only=True):
    """The newest first."""

    requests: list[SummaryBody]


@router.get("", summary="The last requests, the newest first")
async def recent_requests(http: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Response:
    """Ids to ask the other route for."""
    found = service_of(http).observation.monitor.timelines(limit=limit)
    return json_answer(
        SummariesBody(
            requests=[
                SummaryBody(
                    id=one.request_id,
                    client_label=one.client_label,
                    prompt=one.number,
                    state=_state(one),
                    created=one.arrived_on,
                )
                for one in found
            ]
        )
    )


@router.get("/{request_id}", responses=_MISSING, summary="What became of a request, and when")
async def request_timeline(http: Request, request_id: str) -> Response:
    """By the id in its answer (`chatcmpl-...`, `cmpl-...`), or by X-Request-Id, the client's own or the server's."""
    found = service_of(http).observation.monitor.timelines(request_id)
    if not found:
        raise HTTPException(
            404, "no request of this id is known; server.timeline_size says how many of the last ones are"
        )
    return json_answer(TimelinesBody(id=request_id, requests=[_body(one) for one in found]))


def _body(timeline: Timeline) -> TimelineBody:
    return TimelineBody(
        id=timeline.request_id,
        client_label=timeline.client_label,
        prompt=timeline.number,
        state=_state(timeline),
        created=timeline.arrived_on,
        n=timeline.n,
        max_tokens=timeline.max_tokens,
        usage=UsageBody(
            prompt_tokens=timeline.num_prompt_tokens,
            cached_tokens=timeline.num_cached_tokens,
            completion_tokens=timeline.num_output_tokens,
        ),
        num_preemptions=timeline.num_preemptions,
        waited=timeline.waited,
        finish_reasons=timeline.finish_reasons,
        error=timeline.error,
        events=[
            EventBody(
                seconds=round(event.seconds, 6),
                event=event.event,
                choice=event.choice,
                num_tokens=event.num_tokens,
                reason=event.reason,
            )
            for event in sorted(timeline.events, key=lambda event: event.seconds)
        ],
        num_events_left_out=timeline.num_left_out,
    )


def _state(timeline: Timeline) -> str:
    """Of the choice that is the furthest."""
    if timeline.is_ended:
        return "ended"
    return "running" if any(event.event == "scheduled" for event in timeline.events) else "waiting"
