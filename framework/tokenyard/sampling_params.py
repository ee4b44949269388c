"""SamplingParams: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache

from tokenyard.errors import UnsupportedError, ValidationError

logger = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
_MIN_TEMPERATURE = 0.01
_MAX_TEMPERATURE = 2.0
_MOST_SHOWN = 200  # characters of a value in a message

_AVAILABLE = frozenset({
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
})  # fmt: skip
_SAMPLING_LIMITS = frozenset({"top_p", "top_k", "min_p"})
_LENGTHS = frozenset({"max_tokens", "min_tokens"})
_EMPTY_IS_NONE = frozenset({"bad_words", "logit_bias"})


class RequestOutputKind(Enum):
    """What each RequestOutput of a stream holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names, defaults and ranges are vLLM's.

    Available now: temperature, top_p, top_k, seed, max_tokens, min_tokens, stop, stop_token_ids, ignore_eos. The other
    fields are accepted with their default value only; anything else raises UnsupportedError naming the field.

    - `temperature` in [0, 2]: below 1e-5 is greedy, up to 0.01 is raised to 0.01.
    - `top_p` in (0, 1]: sample among the most likely tokens that together reach this probability.
    - `top_k` 0 or -1 = all, else >= 1.
    - `seed`: the request's tokens depend on nothing but its prompt and this number; None or -1 = no seed.
    - `max_tokens` >= 1, or None = until the model's context is full.
    - `min_tokens` from 0 to max_tokens: before so many tokens nothing ends the output, neither an end-of-sequence
      token nor a stop string nor a stop token.
    - `stop`: strings that end the output and are not part of it.
    - `stop_token_ids`: tokens that end the output; the last one is in its `token_ids`, but not in its text.
    - `ignore_eos`: go on after the model's end-of-sequence tokens.

    Raises ValidationError (a ValueError) with `parameter` and `value`.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: object | None = None
    extra_args: dict[str, object] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # A front end makes one a request, nearly all of whose fields have their defaults: those need no check.
        given = [name for name, default in _defaults().items() if getattr(self, name) is not default]
        if not _SAMPLING_LIMITS.isdisjoint(given):
            _check_top(self)
        if "temperature" in given:
            _check_temperature(self)
        _refuse_unavailable(self, given)
        _check_seed(self)
        if not _LENGTHS.isdisjoint(given):
            _check_length(self)
        object.__setattr__(self, "stop", _normalise_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _normalise_stop_token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", self.ignore_eos, "true or false")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` after normalisation: always a tuple."""
        return tuple(self.stop or ())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _invalid(parameter: str, value: object, allowed: str) -> ValidationError:
    return ValidationError(
        f"{parameter}={_short(value)} is not valid: it must be {allowed}", parameter=parameter, value=value
    )


@cache
def _defaults() -> Mapping[str, object]:
    return {field.name: field.default for field in fields(SamplingParams)}


def _refuse_unavailable(params: SamplingParams, given: Sequence[str]) -> None:
    for name in given:
        if name in _AVAILABLE:
            continue
        value, default = getattr(params, name), _defaults()[name]
        is_plain = value is None or isinstance(value, str | int | float | Enum)  # an array has no truth value
        is_neutral = is_plain and isinstance(value, bool) == isinstance(default, bool) and value == default
        is_neutral |= name in _EMPTY_IS_NONE and isinstance(value, Sized) and not len(value)
        if not is_neutral:
            raise UnsupportedError(
                f"SamplingParams: {name}={_short(value)} is not available in this version; leave it at {default!r}",
                parameter=name,
                value=value,
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_temperature(params: SamplingParams) -> None:
    value = params.temperature
    if not _is_number(value) or not 0 <= value <= _MAX_TEMPERATURE:
        raise _invalid("temperature", value, f"a number from 0 to {_MAX_TEMPERATURE:g}")
    if value < _GREEDY_BELOW:
        for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            object.__setattr__(params, name, neutral)
    elif value < _MIN_TEMPERATURE:
        logger.warning("temperature %g is raised to %g: smaller values overflow", value, _MIN_TEMPERATURE)
        object.__setattr__(params, "temperature", _MIN_TEMPERATURE)
    else:
        object.__setattr__(params, "temperature", float(value))


def _check_top(params: SamplingParams) -> None:
    if not _is_number(params.top_p) or not 0 < params.top_p <= 1:
        raise _invalid("top_p", params.top_p, "a number above 0 and up to 1")
    if not _is_number(params.min_p) or not 0 <= params.min_p <= 1:
        raise _invalid("min_p", params.min_p, "a number from 0 to 1")
    if not _is_int(params.top_k) or params.top_k < -1:
        raise _invalid("top_k", params.top_k, "an integer: 0 or -1 for all tokens, else at least 1")


def _check_seed(params: SamplingParams) -> None:
    if params.seed is None:
        return
    if not _is_int(params.seed) or not -1 <= params.seed < 2**63:
        raise _invalid("seed", params.seed, "an integer from 0 to 2**63 - 1, or None for no seed")
    if params.seed == -1:
        object.__setattr__(params, "seed", None)


def _check_length(params: SamplingParams) -> None:
    if params.max_tokens is not None and (not _is_int(params.max_tokens) or params.max_tokens < 1):
        raise _invalid("max_tokens", params.max_tokens, "an integer of at least 1, or None for no limit of its own")
    if not _is_int(params.min_tokens) or params.min_tokens < 0:
        raise _invalid("min_tokens", params.min_tokens, "an integer of at least 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _invalid("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")


def _normalise_stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence):
        raise _invalid("stop", stop, "a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _invalid("stop", stop, "a non-empty string or a list of non-empty strings")
    return tuple(strings)


def _normalise_stop_token_ids(token_ids: object) -> tuple[int, ...]:
    """In order, without repetition."""
    allowed = "a list of token ids, which are integers of at least 0"
    if token_ids is None:
        return ()
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, bytes):
        raise _invalid("stop_token_ids", token_ids, allowed)
    if not all(_is_int(token_id) and token_id >= 0 for token_id in token_ids):
        raise _invalid("stop_token_ids", token_ids, allowed)
    return tuple(dict.fromkeys(token_ids))


def default_sampling_params(generation_config: Mapping[str, object]) -> SamplingParams:
    """The defaults, changed by what a model's generation_config.json says; what is not available is told, once."""
    if generation_config.get("do_sample") is False:
        return SamplingParams(temperature=0.0)
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_tokens"}
    found = {own: generation_config[name] for name, own in names.items() if generation_config.get(name) is not None}
    for name, neutral in (("repetition_penalty", 1.0), ("min_p", 0.0)):
        if generation_config.get(name, neutral) not in (neutral, None):
            logger.warning(
                "the model's generation_config asks for %s=%s, which is not available: it is left out",
                name,
                generation_config[name],
            )
    try:
        return SamplingParams(**found)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValidationError(
            f"the model's generation_config.json: {error}", parameter=error.parameter, value=error.value
        ) from error
