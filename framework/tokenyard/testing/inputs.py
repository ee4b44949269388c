"""A test's words into an EngineCoreRequest, checked as a front end would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import UnsupportedError, ValidationError, did_you_mean
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.request import EngineCoreRequest

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_INT32 = np.iinfo(np.int32)


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
