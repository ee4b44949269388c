"""The sampling fields that completions and chat share, and what becomes of them: SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, SkipValidation

from tokenyard import sampling_checks as checks
from tokenyard.errors import UnsupportedError, ValidationError
from tokenyard.sampling_params import NOT_YET, RequestOutputKind, SamplingParams, generation_config_params
from tokenyard.server.protocol.body import RequestBody, StreamFields

if TYPE_CHECKING:
    from tokenyard.server.service import Service

MAX_STOP = 16  # strings
MAX_STOP_LENGTH = 256  # characters
MAX_BIASES = 1024  # entries of logit_bias

_Id = Annotated[int, Field(ge=0, le=checks.MAX_TOKEN_ID)]
_Text = Annotated[str, Field(min_length=1, max_length=256)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class SamplingFields(StreamFields):
    """How tokens are chosen and when the answer ends; names and ranges are those of SamplingParams.

    A field that is null or left out has the model's own default (of its generation_config.json), else OpenAI's. The
    bounds here are for /openapi.json: values are checked once, by SamplingParams, whose messages name the field, the
    value and what is allowed.
    """

    n: Annotated[int | None, Field(ge=1, le=16384, description="Choices; at most server.max_n"), SkipValidation] = None
    temperature: Annotated[float | None, Field(ge=0, le=2), SkipValidation] = None
    top_p: Annotated[float | None, Field(gt=0, le=1), SkipValidation] = None
    top_k: Annotated[
        int | None, Field(ge=-1, le=checks.MAX_TOKEN_ID, description="0 or -1: all tokens"), SkipValidation
    ] = None
    min_p: Annotated[float | None, Field(ge=0, le=1), SkipValidation] = None
    presence_penalty: Annotated[_Penalty | None, SkipValidation] = None
    frequency_penalty: Annotated[_Penalty | None, SkipValidation] = None
    repetition_penalty: Annotated[float | None, Field(ge=1e-4, le=1e4), SkipValidation] = None
    seed: Annotated[int | None, Field(ge=-1, le=2**63 - 1, description="-1: none"), SkipValidation] = None
    stop: Annotated[_Text | Annotated[list[_Text], Field(max_length=MAX_STOP)] | None, SkipValidation] = None
    stop_token_ids: Annotated[Annotated[list[_Id], Field(max_length=256)] | None, SkipValidation] = None
    ignore_eos: Annotated[bool | None, SkipValidation] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=2**63 - 1), SkipValidation] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(ge=-1, le=checks.MAX_TOKEN_ID, description="At most model.max_logprobs; not with a stream"),
        SkipValidation,
    ] = None
    skip_special_tokens: Annotated[bool | None, SkipValidation] = None
    include_stop_str_in_output: Annotated[bool | None, SkipValidation] = None
    stream_interval: Annotated[
        _Count | None, Field(description="A stream sends a chunk every so many tokens"), SkipValidation
    ] = None
    logit_bias: Annotated[
        Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], float], Field(max_length=MAX_BIASES)] | None,
        Field(description="Token id to what is added to its logit, clipped to [-100, 100]"),
        SkipValidation,
    ] = None
    allowed_token_ids: Annotated[Annotated[list[_Id], Field(min_length=1, max_length=2**18)] | None, SkipValidation] = (
        None
    )
    bad_words: Annotated[_Text | Annotated[list[_Text], Field(max_length=2048)] | None, SkipValidation] = None
    extra_args: Annotated[
        dict[str, object] | None, Field(description="What logits processors are told of the request"), SkipValidation
    ] = None
    vllm_xargs: Annotated[dict[str, object] | None, Field(description="The same as extra_args"), SkipValidation] = None
    return_token_ids: Annotated[bool | None, Field(description="Add the token ids of prompt and choices")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Field(description="Logprobs call a token `token_id:N` instead of its text")
    ] = None


SHARED = frozenset(SamplingFields.model_fields) & frozenset(SamplingParams.__dataclass_fields__)

_NO_OPTIONS: tuple[object, ...] = ({},)
_NO_ITEMS: tuple[object, ...] = ([],)

UNSUPPORTED: Mapping[str, Sequence[object]] = MappingProxyType({
    **{name: () for name in NOT_YET if name not in SHARED},
    "spaces_between_special_tokens": (True,),
    "flat_logprobs": (False,),
    "routed_experts_prompt_start": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "structured_outputs": _NO_OPTIONS,
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "logits_processors": _NO_ITEMS,
    "lora_request": (),
    "lora_path": (),
    "mm_processor_kwargs": _NO_OPTIONS,
    "media_io_kwargs": _NO_OPTIONS,
    "documents": _NO_ITEMS,
    "truncate_prompt_tokens": (),
    "truncation_side": (),
})  # fmt: skip
"""Fields of features that are not there, with the values that ask for nothing; null is one of every field."""


def refuse_unsupported(body: RequestBody, own: Mapping[str, Sequence[object]] = MappingProxyType({})) -> Sequence[str]:
    """Raise UnsupportedError for a field of a feature that is not there, unless its value asks for nothing.

    `own` are the endpoint's, in the form of UNSUPPORTED. Returns the fields that nothing knows.
    """
    unknown = []
    for name, value in (body.model_extra or {}).items():
        neutral = own.get(name, UNSUPPORTED.get(name))
        if neutral is None:
            unknown.append(name)
        elif value is not None and not any(_is_same(value, one) for one in neutral):
            raise UnsupportedError(
                f"{name}={checks.short(value)} is not available in this version; leave it out",
                parameter=name,
                value=value,
            )
    return unknown


def _is_same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


_logprobs = checks.integer(-1, checks.MAX_TOKEN_ID, words="; 0 = of the token alone, -1 = of the whole vocabulary")

LIMITS: Mapping[str, checks.Check] = MappingProxyType({
    "stop": checks.strings(MAX_STOP, MAX_STOP_LENGTH),
    "logit_bias": checks.logit_bias(MAX_BIASES),
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
})  # fmt: skip
"""Where the server allows less than SamplingParams does."""


def check_num_choices(n: object, config_max_n: int) -> int:
    """The number of choices; raises ValidationError for one that is above server.max_n."""
    count = 1 if n is None else n
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= config_max_n:
        raise checks.invalid("n", n, f"an integer of at least 1 and at most {config_max_n} (server.max_n)")
    return count


def sampling_params(
    body: SamplingFields,
    service: Service,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What one prompt of this request asks of the engine.

    What the request says comes first, then the model's generation_config, then OpenAI's defaults, of which
    `default_max_tokens` is the endpoint's own (None = what the context leaves). `prompt_logprobs` is what the endpoint
    needs of its own; the body's field comes first. Raises ValidationError naming the field.
    """
    given = {name: value for name, value in body if name in SHARED and value is not None}
    given["n"] = check_num_choices(body.n, service.config.server.max_n)
    own = {"max_tokens": max_tokens, "logprobs": logprobs, "extra_args": _extra_args(body)}
    given |= {name: value for name, value in own.items() if value is not None}
    if prompt_logprobs is not None:
        given.setdefault("prompt_logprobs", prompt_logprobs)
    given |= {name: check(name, given[name]) for name, check in LIMITS.items() if name in given}
    kind = RequestOutputKind.DELTA if body.is_stream else RequestOutputKind.FINAL_ONLY
    defaults = generation_config_params(service.engine.front.engine.files.generation_config)
    try:
        return SamplingParams(**{"max_tokens": default_max_tokens, **defaults, **given, "output_kind": kind})
    except ValidationError as error:
        raise _blamed(error, given, defaults) from error


def _extra_args(body: SamplingFields) -> Mapping[str, object] | None:
    if body.extra_args is not None and body.vllm_xargs is not None:
        raise ValidationError(
            "extra_args and vllm_xargs are two names of one field; give one of them", parameter="vllm_xargs", value=None
        )
    return body.vllm_xargs if body.extra_args is None else body.extra_args


def _blamed(error: ValidationError, given: Mapping[str, object], defaults: Mapping[str, object]) -> ValidationError:
    """The error itself, or one that says where a value comes from that the request does not have."""
    if error.parameter in given or error.parameter not in defaults:
        return error
    message = f"the model's generation_config.json: {error}; give {error.parameter} with the request"
    return ValidationError(message, parameter=error.parameter, value=error.value)
