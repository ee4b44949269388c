"""What a request must meet to be queued: checked here again although front ends have checked it, since one bad request
must never reach the step loop that all share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import CapacityError, ConfigError, ValidationError
from tokenyard.interfaces.kv_cache import ExtraKey
from tokenyard.request import RETENTION_LEVELS
from tokenyard.sampling_checks import short
from tokenyard.sampling_params import SamplingParams
from tokenyard.vocabulary_checks import check_ids, check_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.scheduler import SchedulerContext
    from tokenyard.request import EngineCoreRequest

MAX_NAME = 256  # characters: hashed for every block
MAX_PRIORITY = 2**53  # a policy may compute with it in floating point


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one engine. Lengths are in tokens."""

    max_model_len: int
    vocab_size: int
    capacity: int  # what one request can hold with the whole K/V cache to itself

    def total_length(self, request: EngineCoreRequest) -> int:
        """Prompt and output together: the length at which the request ends. Raises when it can never run."""
        if not isinstance(request.request_id, str):
            raise TypeError(f"a request id is a string; got {request.request_id!r}")
        _check_number("arrival_time", request.arrival_time)
        if not isinstance(request.priority, int) or not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
            raise ValidationError(
                f"priority={request.priority!r} is not valid: it must be an integer from -2**53 to 2**53 (lower is "
                "more urgent)",
                parameter="priority",
                value=request.priority,
            )
        if request.deadline is not None:
            _check_number("deadline", request.deadline)
        if not isinstance(request.params, SamplingParams):
            raise ValidationError("pooling requests are not available", parameter="params", value=request.params)
        self._check_prompt(request)
        self._check_params(request, request.params)
        _check_extra_keys(request.extra_keys)
        _check_names(request)
        num_prompt = len(request.prompt_token_ids)
        wanted = self.max_model_len if request.params.max_tokens is None else request.params.max_tokens
        # The last token's K/V is never needed, so one more than the cache holds can be returned.
        return min(num_prompt + wanted, self.max_model_len, self.capacity + 1)

    def min_tokens(self, request: EngineCoreRequest) -> int:
        """Output tokens before which no stop token counts."""
        return min(request.params.min_tokens, self.max_model_len) if isinstance(request.params, SamplingParams) else 0

    def _check_prompt(self, request: EngineCoreRequest) -> None:
        ids = request.prompt_token_ids
        if not 0 < len(ids) < self.max_model_len:
            raise ValidationError(
                f"the prompt has {len(ids)} tokens; this model takes 1 to {self.max_model_len - 1}, so that one of its "
                f"{self.max_model_len} is left for the output",
                parameter="prompt",
                value=len(ids),
            )
        # As unsigned numbers negative ids are large ones, so that one pass finds both.
        unsigned = ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint64)
        if int(unsigned.max()) >= self.vocab_size:
            lowest, highest = int(ids.min()), int(ids.max())
            bad = lowest if lowest < 0 else highest
            raise ValidationError(
                f"prompt token id {bad} is outside the vocabulary, 0 to {self.vocab_size - 1}",
                parameter="prompt",
                value=bad,
            )
        if len(ids) > self.capacity:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens but the whole K/V cache holds {self.capacity}; shorten it, or give "
                "more room with kv_cache.num_blocks or kv_cache.memory"
            )

    def _check_params(self, request: EngineCoreRequest, params: SamplingParams) -> None:
        if params.n != 1:
            raise ValidationError(
                f"n={params.n}: the engine takes a request for each choice, made with SamplingParams.child",
                parameter="n",
                value=params.n,
            )
        check_params(params, request.stop_token_ids, vocab_size=self.vocab_size)
        for ids in request.bad_words_token_ids:
            check_ids("bad_words", "bad_words: token id", ids, self.vocab_size)


def limits_of(context: SchedulerContext) -> Limits:
    """Those of a scheduler; raises ConfigError when a prompt of legal length could never run."""
    config = context.config
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < context.max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens={config.max_num_batched_tokens} < "
            f"model.max_model_len={context.max_model_len}: without chunked prefill a longer prompt could never run; "
            "raise it, lower model.max_model_len, or set scheduler.enable_chunked_prefill=true"
        )
    return Limits(
        max_model_len=context.max_model_len,
        vocab_size=context.vocab_size,
        capacity=context.kv_cache_manager.capacity_tokens(),
    )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValidationError(f"{name}={value!r} is not valid: it must be a number", parameter=name, value=value)


def _check_names(request: EngineCoreRequest) -> None:
    """What the prefix cache makes a key of, and how long it is told to keep what is there."""
    for name, value in (("cache_salt", request.cache_salt), ("lora_name", request.lora_name)):
        if value is not None and not (isinstance(value, str) and len(value) <= MAX_NAME):
            allowed = f"text of at most {MAX_NAME} characters"
            message = f"{name}={short(value)} is not valid: it must be {allowed}"
            raise ValidationError(message, parameter=name, value=value)
    if request.retention not in RETENTION_LEVELS:
        raise ValidationError(
            f"retention={short(request.retention)} is not valid: it must be one of {', '.join(RETENTION_LEVELS)}",
            parameter="retention",
            value=request.retention,
        )


def _check_extra_keys(extra_keys: Sequence[ExtraKey]) -> None:
    for extra in extra_keys:
        if not isinstance(extra, ExtraKey) or not isinstance(extra.key, str) or not 0 <= extra.start <= extra.end:
            raise ValidationError(
                f"extra_keys: {extra!r} is not valid: it must be an ExtraKey(key, start, end) with 0 <= start <= end",
                parameter="extra_keys",
                value=extra,
            )
