"""SamplingParams: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import compress
from operator import attrgetter, is_not
from types import MappingProxyType

from tokenyard import sampling_checks as checks
from tokenyard.errors import ValidationError

logger = logging.getLogger(__name__)

_GREEDY_BELOW = 1e-5
_MIN_TEMPERATURE = 0.01
_MAX_COUNT = 2**63 - 1  # what crosses processes as a 64-bit number
_SEEDS = 2**63


class RequestOutputKind(Enum):
    """What each RequestOutput of a stream holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(Enum):
    """How a request's tokens are chosen."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names, defaults and ranges are vLLM's. Immutable; sequences become tuples without repetition.

    - `n`: how many completions, 1 to 16384. Equal when greedy; with a seed, choice i has the seed `seed + i`.
    - `presence_penalty` in [-2, 2]: subtracted from the logits of tokens that are in the output.
    - `frequency_penalty` in [-2, 2]: subtracted as often as a token is in the output.
    - `repetition_penalty` from 0.0001 to 10000: tokens of prompt and output have their logits divided by it where they
      are positive and multiplied where negative; 1 changes nothing.
    - `temperature` in [0, 2]: below 1e-5 is greedy, up to 0.01 is raised to 0.01.
    - `top_p` in (0, 1]: sample among the most likely tokens that together reach this probability.
    - `top_k` 0 or -1 = all, else >= 1.
    - `min_p` in [0, 1]: only tokens at least this likely, as a share of the most likely one's probability.
    - `seed`: the request's tokens depend on nothing but its prompt and this number; None or -1 = no seed.
    - `stop`: strings that end the output and are not part of it; at most 256, of up to 4096 characters. They need
      `detokenize`.
    - `stop_token_ids`: tokens that end the output, at most 256; the last one is in its `token_ids`, but not in its
      text.
    - `ignore_eos`: go on after the model's end-of-sequence tokens.
    - `max_tokens` >= 1, or None = until the model's context is full.
    - `min_tokens` from 0 to max_tokens: before so many tokens nothing ends the output, neither an end-of-sequence
      token nor a stop string nor a stop token.
    - `logprobs`: of each token, and of so many most likely ones; 0 = of the token alone, -1 = of the whole vocabulary,
      True = 1. At most `model.max_logprobs`.
    - `prompt_logprobs`: the same of the prompt's tokens.
    - `detokenize`: whether the output has text.
    - `skip_special_tokens`: leave control tokens out of the text.
    - `include_stop_str_in_output`: keep what ended the output, a stop string or a stop token, in the text.
    - `output_kind`: what each output of a stream holds.
    - `stream_interval` >= 1: a stream has an output every so many tokens; None = with each step.
    - `logit_bias`: token id -> what is added to its logit, clipped to [-100, 100]; ids may be text of digits.
    - `allowed_token_ids`: no other token is sampled; None = all may be.
    - `bad_words`: words that the output never completes, at the start of it or inside; at most 2048, of up to 256
      characters.
    - `extra_args`: what logits processors are told of the request: a dict of JSON values, up to 65536 characters.
    - `skip_reading_prefix_cache`: compute the whole prompt; None = only for prompt logprobs, which need it.

    The other fields take their default only; anything else raises UnsupportedError naming the field. A value out of its
    range raises ValidationError (a ValueError) with `parameter` and `value`.
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
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: object | None = None
    extra_args: Mapping[str, object] | None = field(default=None, hash=False)
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: object | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        # A front end makes one a request, nearly all of whose fields have their defaults: those need no check.
        for name in compress(_NAMES, map(is_not, _values(self), _DEFAULTS)):
            _set(self, name, CHECKS[name](name, getattr(self, name)))
        if self.stop is None:
            _set(self, "stop", ())
        if self.stop_token_ids is None:
            _set(self, "stop_token_ids", ())
        if self.temperature < _MIN_TEMPERATURE:
            _settle_temperature(self)
        if self.min_tokens:
            _check_min_tokens(self)
        if self.stop and not self.detokenize:
            raise checks.invalid("detokenize", self.detokenize, "True with stop, which is found in text")
        if self.prompt_logprobs is not None:
            _settle_cache_reading(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def sampling_type(self) -> SamplingType:
        """How tokens are chosen."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` after normalisation: always a tuple."""
        return tuple(self.stop or ())

    def child(self, index: int) -> SamplingParams:
        """The parameters of choice `index` of n, which is a request of its own; choices without a seed are alike."""
        if self.n == 1 and (self.seed is None or index == 0):
            return self
        seed = None if self.seed is None else (self.seed + index) % _SEEDS
        return dataclasses.replace(self, n=1, seed=seed)


_set = object.__setattr__
_NAMES = tuple(one.name for one in fields(SamplingParams))
_DEFAULTS = tuple(one.default for one in fields(SamplingParams))
_values = attrgetter(*_NAMES)

NOT_YET = frozenset({
    "flat_logprobs",
    "logprob_token_ids",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "repetition_detection",
    "routed_experts_prompt_start",
    "spaces_between_special_tokens",
    "structured_outputs",
    "thinking_token_budget",
    "trace_decode_token_ids",
})  # fmt: skip
"""Fields that take nothing but their default in this version."""

_logprobs = checks.integer(
    -1,
    checks.MAX_TOKEN_ID,
    also={None: None, True: 1, False: None},
    words="; 0 = of the token alone, -1 = of the whole vocabulary, None = none",
)

CHECKS: Mapping[str, checks.Check] = MappingProxyType({
    "n": checks.integer(1, 16384),
    "presence_penalty": checks.number(-2, 2),
    "frequency_penalty": checks.number(-2, 2),
    "repetition_penalty": checks.number(1e-4, 1e4),
    "temperature": checks.number(0, 2),
    "top_p": checks.number(0, 1, above_low=True),
    "top_k": checks.integer(1, checks.MAX_TOKEN_ID, also={0: 0, -1: 0}, words=", or 0 or -1 for all tokens"),
    "min_p": checks.number(0, 1),
    "seed": checks.integer(0, _SEEDS - 1, also={None: None, -1: None}, words=", or None or -1 for no seed"),
    "stop": checks.strings(256, 4096),
    "stop_token_ids": checks.token_ids(256),
    "ignore_eos": checks.truth,
    "max_tokens": checks.integer(1, _MAX_COUNT, also={None: None}, words=", or None for no limit of its own"),
    "min_tokens": checks.integer(0, _MAX_COUNT),
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "detokenize": checks.truth,
    "skip_special_tokens": checks.truth,
    "include_stop_str_in_output": checks.truth,
    "output_kind": checks.member(RequestOutputKind),
    "stream_interval": checks.integer(1, _MAX_COUNT, also={None: None}, words=", or None for each step"),
    "logit_bias": checks.logit_bias(16384),
    "allowed_token_ids": checks.token_ids(2**18, empty=False),
    "bad_words": checks.strings(2048, 256, none=None),
    "extra_args": checks.json_object(65536),
    "skip_reading_prefix_cache": checks.truth_or_none,
    **{name: checks.unavailable(default) for name, default in zip(_NAMES, _DEFAULTS, strict=True) if name in NOT_YET},
})  # fmt: skip
"""What each field takes; every limit stands here."""


def _settle_temperature(params: SamplingParams) -> None:
    if params.temperature < _GREEDY_BELOW:
        for name, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            _set(params, name, neutral)
        return
    logger.warning("temperature %g is raised to %g: smaller values overflow", params.temperature, _MIN_TEMPERATURE)
    _set(params, "temperature", _MIN_TEMPERATURE)


def _check_min_tokens(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise checks.invalid("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")


def _settle_cache_reading(params: SamplingParams) -> None:
    if params.skip_reading_prefix_cache is False:
        allowed = "True or None with prompt_logprobs, for which every prompt token is computed"
        raise checks.invalid("skip_reading_prefix_cache", False, allowed)
    _set(params, "skip_reading_prefix_cache", True)


_FROM_GENERATION_CONFIG: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}


def generation_config_params(generation_config: Mapping[str, object]) -> dict[str, object]:
    """What a model's generation_config.json says of sampling, unchecked, by the names of SamplingParams.

    `do_sample: false` is temperature 0.
    """
    names = _FROM_GENERATION_CONFIG.items()
    found = {own: generation_config[name] for name, own in names if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def default_sampling_params(generation_config: Mapping[str, object]) -> SamplingParams:
    """What `sampling_params=None` stands for: the defaults, changed by what a model's generation_config.json says.

    Parameters that a user gives are never mixed with these. Raises ValidationError for a value that SamplingParams
    refuses.
    """
    found = generation_config_params(generation_config)
    try:
        return SamplingParams(**found)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValidationError(
            f"the model's generation_config.json: {error}", parameter=error.parameter, value=error.value
        ) from error


def log_default_sampling_params(generation_config: Mapping[str, object]) -> None:
    """Say at start-up, once, how `sampling_params=None` differs from `SamplingParams()`."""
    try:
        params = default_sampling_params(generation_config)
    except ValidationError as error:
        logger.warning("%s; give sampling_params with every request", error)
        return
    changed = [
        f"{name}={value}"
        for name, value, default in zip(_NAMES, _values(params), _values(SamplingParams()), strict=True)
        if value != default
    ]
    if changed:
        logger.info("sampling_params=None means %s, of the model's generation_config", ", ".join(changed))
