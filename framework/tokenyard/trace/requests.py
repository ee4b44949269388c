"""EngineCoreRequest as a record, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.kv_cache import ExtraKey
from tokenyard.ipc.params import params_from_message, params_to_message
from tokenyard.ipc.plain import to_plain
from tokenyard.request import EngineCoreRequest, ServiceLevel
from tokenyard.sampling_params import SamplingParams
from tokenyard.trace.records import AddedRequest, seconds_of, time_value

if TYPE_CHECKING:
    from collections.abc import Mapping


def request_to_record(request: EngineCoreRequest) -> AddedRequest:
    """Raises TypeError, or ValueError, for what no front end of ours makes."""
    if not isinstance(request.params, SamplingParams):
        raise TypeError(f"request {request.request_id!r} pools")
    level = request.service_level
    return AddedRequest(
        id=request.request_id,
        prompt=tuple(np.asarray(request.prompt_token_ids, dtype=np.int32).tolist()),
        params=params_to_message(request.params),
        arrival=time_value(request.arrival_time),
        stop_token_ids=tuple(request.stop_token_ids),
        eos_token_ids=tuple(request.eos_token_ids),
        bad_words_token_ids=tuple(tuple(ids) for ids in request.bad_words_token_ids),
        priority=request.priority,
        client=request.client_id,
        session=request.session_id,
        parent=request.parent_id,
        deadline=None if request.deadline is None else time_value(request.deadline),
        service_level=None if level is None else (level.ttft, level.tpot, level.e2e),
        skip_prefix_cache=request.skip_prefix_cache,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        extra_keys=tuple((extra.key, extra.start, extra.end) for extra in request.extra_keys),
        metadata={name: to_plain(value) for name, value in request.metadata.items()},
        retention=request.retention,
        true_output_tokens=request.true_output_tokens,
    )


def request_from_record(record: AddedRequest, metadata: Mapping[str, object]) -> EngineCoreRequest:
    """`metadata` as the policy has it: the record's own is plain data. Raises ValueError, and so ValidationError."""
    level = record.service_level
    return EngineCoreRequest(
        request_id=record.id,
        prompt_token_ids=np.array(record.prompt, dtype=np.int32),
        params=params_from_message(record.params),
        arrival_time=seconds_of(record.arrival),
        stop_token_ids=record.stop_token_ids,
        eos_token_ids=record.eos_token_ids,
        bad_words_token_ids=record.bad_words_token_ids,
        priority=record.priority,
        client_id=record.client,
        session_id=record.session,
        parent_id=record.parent,
        deadline=None if record.deadline is None else seconds_of(record.deadline),
        service_level=None if level is None else ServiceLevel(*level),
        skip_prefix_cache=record.skip_prefix_cache,
        cache_salt=record.cache_salt,
        lora_name=record.lora_name,
        extra_keys=tuple(ExtraKey(*extra) for extra in record.extra_keys),
        metadata=metadata,
        retention=record.retention,
        true_output_tokens=record.true_output_tokens,
    )
