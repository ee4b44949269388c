"""Checks of sampling parameters that need to know the model: its vocabulary and its limit on logprobs.

A front end makes them before anything is queued, and the engine again: one bad request must never reach the step loop
that all share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tokenyard.errors import ValidationError
from tokenyard.sampling_checks import listed

if TYPE_CHECKING:
    from tokenyard.sampling_params import SamplingParams

MAX_STOP_IDS = 256  # each sampled token is compared with as many as the request in the batch that has most
NO_LIMIT = -1
WHOLE_VOCABULARY = -1


def check_params(
    params: SamplingParams, stop_token_ids: Sequence[int], *, vocab_size: int, max_logprobs: int = NO_LIMIT
) -> None:
    """Raise ValidationError for what a model of that vocabulary cannot meet; `stop_token_ids` has the EOS ids too."""
    if stop_token_ids:
        _check_stop_ids(stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        check_ids("allowed_token_ids", "allowed_token_ids: token id", params.allowed_token_ids, vocab_size)
    if params.logit_bias is not None:
        check_ids("logit_bias", "logit_bias: token id", params.logit_bias, vocab_size)
    if params.logprobs is not None:
        _check_logprobs("logprobs", params.logprobs, vocab_size, max_logprobs)
    if params.prompt_logprobs is not None:
        _check_logprobs("prompt_logprobs", params.prompt_logprobs, vocab_size, max_logprobs)


def check_ids(parameter: str, what: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise ValidationError naming every id that is not in the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    bad = list(dict.fromkeys(token_id for token_id in token_ids if not 0 <= token_id < vocab_size))
    several = len(bad) > 1
    raise ValidationError(
        f"{what}{'s' if several else ''} {listed(bad)} {'are' if several else 'is'} outside the vocabulary, 0 to "
        f"{vocab_size - 1}",
        parameter=parameter,
        value=bad if several else bad[0],
    )


def _check_stop_ids(stop_ids: Sequence[int], vocab_size: int) -> None:
    if len(stop_ids) > MAX_STOP_IDS:
        raise ValidationError(
            f"stop_token_ids: {len(stop_ids)}, the model's own included; at most {MAX_STOP_IDS} are allowed",
            parameter="stop_token_ids",
            value=len(stop_ids),
        )
    check_ids("stop_token_ids", "stop_token_ids: token id", stop_ids, vocab_size)


def _check_logprobs(parameter: str, asked: int, vocab_size: int, max_logprobs: int) -> None:
    if asked > vocab_size:
        raise ValidationError(
            f"{parameter}={asked} is more than the vocabulary, {vocab_size} tokens; -1 asks for all of it",
            parameter=parameter,
            value=asked,
        )
    count = vocab_size if asked == WHOLE_VOCABULARY else asked
    if max_logprobs != NO_LIMIT and count > max_logprobs:
        whole = ", the whole vocabulary," if asked == WHOLE_VOCABULARY else ""
        raise ValidationError(
            f"{parameter}={asked}{whole} is above model.max_logprobs={max_logprobs}; lower it, or raise the limit "
            "(-1 = none)",
            parameter=parameter,
            value=asked,
        )
