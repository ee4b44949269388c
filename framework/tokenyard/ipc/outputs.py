"""EngineCoreOutputs as a message, and back. K/V events do not travel: observers get them where they arise."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import msgspec
import numpy as np

from tokenyard.engine_outputs import (
    AdmittedRequest,
    EngineCoreOutputs,
    FinishedRequest,
    PluginStats,
    RequestEvent,
    RequestEventKind,
    SchedulerStats,
    ShadowStats,
)
from tokenyard.ipc.codec import Array
from tokenyard.ipc.logprobs import (
    LogprobsMessage,
    PromptLogprobsMessage,
    logprobs_from_message,
    logprobs_to_message,
    prompt_logprobs_from_message,
    prompt_logprobs_to_message,
)
from tokenyard.request import FinishReason


class FinishedMessage(msgspec.Struct, frozen=True, array_like=True):
    """See FinishedRequest."""

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    client_id: str | None = None
    num_preemptions: int = 0


class AdmittedMessage(msgspec.Struct, frozen=True, array_like=True):
    """See AdmittedRequest."""

    request_id: str
    num_cached_tokens: int
    age: float  # seconds since its first step began
    client_id: str | None = None


class EventMessage(msgspec.Struct, frozen=True, array_like=True):
    """See RequestEvent."""

    request_id: str
    kind: RequestEventKind
    age: float  # seconds
    num_tokens: int = 0
    reason: str | None = None
    mode: str | None = None


class StatsMessage(msgspec.Struct, frozen=True, array_like=True):
    """See SchedulerStats."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_free_blocks: int
    num_total_blocks: int
    num_skipped: int = 0
    preempted_prefix_cache_queries: int = 0
    preempted_prefix_cache_hits: int = 0
    wait_reason: str | None = None
    num_waiting_by_reason: Mapping[str, int] = {}
    num_rejected_by_reason: Mapping[str, int] = {}
    plugins: PluginStats | None = None
    shadow: ShadowStats | None = None
    num_paused: int = 0


class OutputsMessage(msgspec.Struct, frozen=True, omit_defaults=True, tag="outputs"):
    """See EngineCoreOutputs."""

    request_ids: list[str]
    num_tokens: Array
    token_ids: Array
    finished: list[FinishedMessage] = []
    admitted: list[AdmittedMessage] = []
    events: list[EventMessage] = []
    logprobs: LogprobsMessage | None = None
    prompt_logprobs: list[PromptLogprobsMessage] = []
    stats: StatsMessage | None = None
    num_scheduled_tokens: int = 0
    did_run: bool = True


_stats_values = attrgetter(*StatsMessage.__struct_fields__)


def outputs_to_message(outputs: EngineCoreOutputs, now: float) -> OutputsMessage:
    """`now` is the sender's clock."""
    return OutputsMessage(
        request_ids=list(outputs.request_ids),
        num_tokens=Array.of(outputs.num_tokens),
        token_ids=Array.of(outputs.token_ids),
        finished=[
            FinishedMessage(
                end.request_id,
                end.reason,
                _number(end.stop_reason),
                end.error,
                end.client_id,
                end.num_preemptions,
            )
            for end in outputs.finished
        ],
        admitted=[
            AdmittedMessage(one.request_id, int(one.num_cached_tokens), now - one.scheduled_at, one.client_id)
            for one in outputs.admitted
        ],
        events=[
            EventMessage(event.request_id, event.kind, now - event.at, int(event.num_tokens), event.reason, event.mode)
            for event in outputs.events
        ],
        logprobs=None if outputs.logprobs is None else logprobs_to_message(outputs.logprobs),
        prompt_logprobs=list(map(prompt_logprobs_to_message, outputs.prompt_logprobs)),
        stats=None if outputs.stats is None else stats_to_message(outputs.stats),
        num_scheduled_tokens=int(outputs.num_scheduled_tokens),
        did_run=outputs.did_run,
    )


def outputs_from_message(message: OutputsMessage, now: float) -> EngineCoreOutputs:
    """`now` is the receiver's clock. Raises ValueError for arrays that do not fit each other."""
    num_tokens, token_ids = message.num_tokens.values(np.int32, 1), message.token_ids.values(np.int32, 1)
    if len(num_tokens) != len(message.request_ids) or int(num_tokens.sum()) != len(token_ids):
        raise ValueError(f"{len(message.request_ids)} requests, {num_tokens.tolist()} tokens each: {len(token_ids)}")
    return EngineCoreOutputs(
        request_ids=message.request_ids,
        num_tokens=num_tokens,
        token_ids=token_ids,
        finished=list(map(_finished, message.finished)),
        admitted=[_admitted(one, now) for one in message.admitted],
        events=[_event(one, now) for one in message.events],
        logprobs=None if message.logprobs is None else logprobs_from_message(message.logprobs),
        prompt_logprobs=list(map(prompt_logprobs_from_message, message.prompt_logprobs)),
        stats=None if message.stats is None else stats_from_message(message.stats),
        num_scheduled_tokens=message.num_scheduled_tokens,
        did_run=message.did_run,
    )


def _finished(end: FinishedMessage) -> FinishedRequest:
    return FinishedRequest(
        request_id=end.request_id,
        reason=end.reason,
        stop_reason=end.stop_reason,
        error=end.error,
        client_id=end.client_id,
        num_preemptions=end.num_preemptions,
    )


def _admitted(one: AdmittedMessage, now: float) -> AdmittedRequest:
    return AdmittedRequest(
        request_id=one.request_id,
        num_cached_tokens=one.num_cached_tokens,
        scheduled_at=now - one.age,
        client_id=one.client_id,
    )


def _event(event: EventMessage, now: float) -> RequestEvent:
    return RequestEvent(
        request_id=event.request_id,
        kind=event.kind,
        at=now - event.age,
        num_tokens=event.num_tokens,
        reason=event.reason,
        mode=event.mode,
    )


def stats_to_message(stats: SchedulerStats) -> StatsMessage:
    """What crosses processes."""
    return StatsMessage(*_stats_values(stats))


def stats_from_message(message: StatsMessage) -> SchedulerStats:
    """The stats themselves."""
    return SchedulerStats(**dict(zip(StatsMessage.__struct_fields__, _stats_values(message), strict=True)))


def _number(value: int | str | None) -> int | str | None:
    """A plain number: a scheduler may take it out of an array."""
    return int(value) if isinstance(value, np.integer) else value
