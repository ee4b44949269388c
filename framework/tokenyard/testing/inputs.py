"""A test's words: what a harness is made with, and a request as a front end would check it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from tokenyard.errors import UnsupportedError, ValidationError, did_you_mean
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.request import EngineCoreRequest
    from tokenyard.scheduler_output import SchedulerOutput

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_INT32 = np.iinfo(np.int32)
_EOS = 50256  # GPT-2's, where the vocabulary has it

EnumT = TypeVar("EnumT", bound=Enum)

StepSeconds: TypeAlias = "float | Callable[[SchedulerOutput], float] | None"
"""How long each step takes: a number, or by what it computes; None = no time."""


def checked_overrides(given: object) -> list[str]:
    """Overrides of a harness or a suite; None = none."""
    if given is None:
        return []
    if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, str) for one in given):
        return list(given)
    raise ValidationError(
        f"overrides are a list of strings such as ['kv_cache.num_blocks=64']; got {given!r}",
        parameter="overrides",
        value=given,
    )


def checked_seconds(parameter: str, given: float) -> float:
    """A time span."""
    if isinstance(given, Real) and math.isfinite(given) and given >= 0:
        return float(given)
    raise ValidationError(
        f"{parameter} is a number of seconds, at least 0; got {given!r}", parameter=parameter, value=given
    )


def checked_step_seconds(given: StepSeconds) -> StepSeconds:
    """A time span, or a function whose answers are checked when it is asked."""
    return given if given is None or callable(given) else checked_seconds("step_seconds", given)


def checked_choice(parameter: str, allowed: type[EnumT], given: EnumT | str) -> EnumT:
    """A member of an enumeration, or its value."""
    values = [member.value for member in allowed]
    if given not in values:
        raise ValidationError(
            f"{parameter} is one of {', '.join(map(repr, values))}; got {given!r}", parameter=parameter, value=given
        )
    return allowed(given)


def checked_windows(given: Sequence[int | None]) -> tuple[int | None, ...]:
    """The sliding window of each K/V group."""
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    if is_sequence and given and all(one is None or (_is_integer(one) and one >= 1) for one in given):
        return tuple(given)
    raise ValidationError(
        "group_windows has an entry for each K/V group, at least one: tokens of its sliding window, at least 1, or "
        f"None for full attention; got {given!r}",
        parameter="group_windows",
        value=given,
    )


def eos_ids(given: int | Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """The model's EOS tokens; None = one that the vocabulary has, an empty list = none."""
    if not _is_integer(vocab_size) or vocab_size < 1:
        raise ValidationError(
            f"vocab_size is a number of tokens, at least 1; got {vocab_size!r}",
            parameter="vocab_size",
            value=vocab_size,
        )
    if given is None:
        return (min(_EOS, vocab_size - 1),)
    ids = tuple(given) if isinstance(given, Sequence) else (given,)
    if not all(_is_integer(one) and 0 <= one < vocab_size for one in ids):
        raise ValidationError(
            f"eos_token_id is a token id from 0 to {vocab_size - 1} (vocab_size={vocab_size}), or a list of them; got "
            f"{given!r}",
            parameter="eos_token_id",
            value=given,
        )
    return ids


def first_eos(ids: Sequence[int]) -> int:
    """A token that ends a request."""
    if not ids:
        raise ValidationError("this harness was made with no eos_token_id", parameter="eos_token_id", value=())
    return ids[0]


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def sampling_params(given: Mapping[str, object]) -> SamplingParams:
    """Greedy unless a temperature is given; raises what the product raises, and for stop strings besides."""
    for name in given:
        if name not in _SAMPLING_FIELDS:
            raise TypeError(
                f"add() takes fields of SamplingParams and of a request by keyword; it has no {name!r}"
                f"{did_you_mean(name, _SAMPLING_FIELDS)}"
            )
    if given.get("stop"):
        raise UnsupportedError(
            f"stop={given['stop']!r}: a harness has no text, and stop strings are found in text; use stop_token_ids",
            parameter="stop",
            value=given["stop"],
        )
    return SamplingParams(**{"temperature": 0.0, **given})  # type: ignore[arg-type]  # it checks them itself


def token_array(token_ids: Sequence[int], vocab_size: int) -> IntArray:
    """Prompt tokens as the engine takes them. Whether there are too many, or too few, is the engine's business."""
    for token_id in token_ids:
        if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
            raise ValidationError(
                f"prompt token ids are integers; got {token_id!r}", parameter="prompt_token_ids", value=token_id
            )
        if not _INT32.min <= token_id <= _INT32.max:
            raise ValidationError(
                f"prompt token id {token_id} is outside the vocabulary, 0 to {vocab_size - 1}",
                parameter="prompt_token_ids",
                value=token_id,
            )
    return np.array(token_ids, dtype=np.int32)


def stop_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a request: the model's, unless they are ignored, and its own."""
    model_ids = () if params.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*model_ids, *(params.stop_token_ids or ()))))


def longest_total(request: EngineCoreRequest, max_model_len: int, capacity: int) -> int:
    """Prompt and output together: the length at which a request must end."""
    wanted = request.params.max_tokens if isinstance(request.params, SamplingParams) else None
    most = max_model_len if wanted is None else len(request.prompt_token_ids) + wanted
    # The last token's K/V is never needed, so one more than the cache holds can be returned.
    return min(most, max_model_len, capacity + 1)


def script_tokens(request_id: str, tokens: object, vocab_size: int) -> list[int]:
    """What a script says is sampled: a list of token ids, or one of them."""
    given = [tokens] if isinstance(tokens, int | np.integer) else tokens
    if isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes):
        ids = [int(one) for one in given if isinstance(one, int | np.integer) and not isinstance(one, bool)]
        if len(ids) == len(given) and all(0 <= one < vocab_size for one in ids):
            return ids
    raise ValidationError(
        f"the script for '{request_id}' gave {tokens!r}; it gives a list of token ids from 0 to {vocab_size - 1}, [] "
        "for nothing, or None for a token of the harness's choice",
        parameter="tokens",
        value=tokens,
    )
