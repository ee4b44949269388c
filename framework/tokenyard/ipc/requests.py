"""EngineCoreRequest as a message, and back. Times travel as ages, since no two processes need share a clock."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from tokenyard.errors import ValidationError
from tokenyard.interfaces.kv_cache import ExtraKey
from tokenyard.ipc.codec import Array
from tokenyard.ipc.params import SamplingMessage, params_from_message, params_to_message
from tokenyard.ipc.plain import to_plain
from tokenyard.request import EngineCoreRequest, Retention, ServiceLevel, check_true_output_tokens
from tokenyard.sampling_params import SamplingParams


class RequestMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """See EngineCoreRequest."""

    request_id: str
    prompt: Array  # int32 [num_prompt_tokens]
    params: SamplingMessage
    age: float  # seconds since its arrival
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    client_id: str | None = None
    session_id: str | None = None
    parent_id: str | None = None
    seconds_left: float | None = None  # until its deadline
    service_level: tuple[float | None, float | None, float | None] | None = None  # ttft, tpot, e2e
    skip_prefix_cache: bool = False
    cache_salt: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, int, int], ...] = ()
    retention: Retention = "normal"
    metadata: Mapping[str, object] = {}  # plain data
    true_output_tokens: int | None = None


def request_to_message(request: EngineCoreRequest, now: float) -> RequestMessage:
    """`now` is the sender's clock. Raises TypeError for what the receiver would take for no message."""
    _check_types(request)
    if not isinstance(request.params, SamplingParams):
        raise ValidationError("pooling requests are not available", parameter="params", value=request.params)
    level = request.service_level
    return RequestMessage(
        request_id=request.request_id,
        prompt=Array.of(np.asarray(request.prompt_token_ids, dtype=np.int32)),
        params=params_to_message(request.params),
        age=now - request.arrival_time,
        stop_token_ids=tuple(request.stop_token_ids),
        eos_token_ids=tuple(request.eos_token_ids),
        bad_words_token_ids=tuple(tuple(ids) for ids in request.bad_words_token_ids),
        priority=request.priority,
        client_id=request.client_id,
        session_id=request.session_id,
        parent_id=request.parent_id,
        seconds_left=None if request.deadline is None else request.deadline - now,
        service_level=None if level is None else (level.ttft, level.tpot, level.e2e),
        skip_prefix_cache=request.skip_prefix_cache,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        extra_keys=tuple((extra.key, extra.start, extra.end) for extra in request.extra_keys),
        retention=request.retention,
        metadata=_plain_metadata(request),
        true_output_tokens=check_true_output_tokens(request.true_output_tokens),
    )


def request_from_message(message: RequestMessage, now: float) -> EngineCoreRequest:
    """`now` is the receiver's clock; `metadata` is still plain data.

    Raises ValueError (ValidationError among them) for what no front end of ours sends; what only the model can tell is
    left to the scheduler's own limits.
    """
    return EngineCoreRequest(
        request_id=message.request_id,
        prompt_token_ids=message.prompt.values(np.int32, num_axes=1),
        params=params_from_message(message.params),
        arrival_time=now - _finite("age", message.age),
        stop_token_ids=message.stop_token_ids,
        eos_token_ids=message.eos_token_ids,
        bad_words_token_ids=message.bad_words_token_ids,
        priority=message.priority,
        client_id=message.client_id,
        session_id=message.session_id,
        parent_id=message.parent_id,
        deadline=None if message.seconds_left is None else now + _finite("deadline", message.seconds_left),
        service_level=None if message.service_level is None else ServiceLevel(*message.service_level),
        skip_prefix_cache=message.skip_prefix_cache,
        cache_salt=message.cache_salt,
        lora_name=message.lora_name,
        extra_keys=tuple(ExtraKey(*extra) for extra in message.extra_keys),
        retention=message.retention,
        metadata=message.metadata,
        true_output_tokens=message.true_output_tokens,
    )


def _plain_metadata(request: EngineCoreRequest) -> dict[str, object]:
    try:
        return {name: to_plain(value) for name, value in request.metadata.items()}
    except TypeError as error:
        raise ValidationError(f"scheduling: {error}", parameter="scheduling", value=dict(request.metadata)) from error


def _check_types(request: EngineCoreRequest) -> None:
    if not isinstance(request.request_id, str):
        raise TypeError(f"a request id is a string; got {request.request_id!r}")
    priority = request.priority
    if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
        raise ValidationError(
            f"priority={priority!r} is not valid: it must be an integer from -2**53 to 2**53 (lower is more urgent)",
            parameter="priority",
            value=priority,
        )


def _finite(name: str, seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValidationError(f"{name}={seconds} is not a finite number of seconds", parameter=name, value=seconds)
    return seconds
