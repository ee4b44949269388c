"""SamplingParams as a message, and back. Nothing is taken on trust: they are checked again where they arrive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import attrgetter

import msgspec

from tokenyard.errors import ValidationError
from tokenyard.sampling_params import RequestOutputKind, SamplingParams


class SamplingMessage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields of SamplingParams, but for those of features that are not there yet, which have their default."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    extra_args: str | None = None  # JSON, whose whole numbers may be of any size
    skip_reading_prefix_cache: bool | None = None


FIELDS = SamplingMessage.__struct_fields__

_values = attrgetter(*FIELDS)


def params_to_message(params: SamplingParams) -> SamplingMessage:
    """What crosses processes."""
    message = SamplingMessage(*_values(params))
    if params.extra_args is None:
        return message
    return msgspec.structs.replace(message, extra_args=json.dumps(params.extra_args))


def params_from_message(message: SamplingMessage) -> SamplingParams:
    """Raises ValidationError for what SamplingParams refuses, whoever sent it."""
    values = dict(zip(FIELDS, _values(message), strict=True))
    if message.extra_args is not None:
        values["extra_args"] = _read_json(message.extra_args)
    return SamplingParams(**values)


def _read_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"extra_args is no JSON: {error}", parameter="extra_args", value=text[:100]) from error
