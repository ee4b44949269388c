"""InputProcessor: prompts as users give them -> EngineCoreRequests, checked before anything is queued."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NotRequired, TypeAlias, TypedDict, cast

import numpy as np

from tokenyard.config import DEFAULT_MAX_LOGPROBS
from tokenyard.engine.bad_words import BadWords
from tokenyard.errors import ValidationError, did_you_mean
from tokenyard.request import EngineCoreRequest, SchedulingHints
from tokenyard.sampling_checks import num_items, short
from tokenyard.vocabulary_checks import check_ids, check_params

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.sampling_params import SamplingParams

MAX_SALT = 128  # characters


class TextPrompt(TypedDict):
    """A prompt as text. Prompts with different salts never share prefix-cache blocks."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A checked prompt; `text` is None when it was given as token ids."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class InputProcessor:
    """Knows the tokenizer and the limits of one model."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        has_logits_processors: bool = False,
        max_prompt_len: int | None = None,
    ) -> None:
        """`vocab_size` is that of the embedding; `has_logits_processors` says whether anybody reads `extra_args`.

        `max_prompt_len` is for models whose rotations are not defined for every prompt: see `rope_config`.
        """
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_prompt_len = max_prompt_len
        self._max_logprobs = max_logprobs
        self._has_logits_processors = has_logits_processors
        self._bad_words = BadWords(tokenizer, vocab_size)
        # A config may name more than the embedding has rows for: those are never sampled.
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)

    @property
    def max_prompt_tokens(self) -> int:
        """At most so many leave room for a token of output."""
        return self._max_model_len - 1

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> TokenizedPrompt:
        """Raises ValidationError for a prompt that is empty, too long or out of the vocabulary.

        Without `add_special_tokens` a text gets none but those that are written in it.
        """
        salt: str | None = None
        if isinstance(prompt, Mapping):
            prompt, salt = _opened(prompt)
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, max_tokens=self.max_prompt_tokens
            )
            tokenized = TokenizedPrompt(prompt, ids, salt)
        else:
            self._check_length(num_items(_as_sequence(prompt)))  # before a look at each of them
            tokenized = TokenizedPrompt(None, _token_ids(prompt), salt)
        self.check(tokenized)
        return tokenized

    def check(self, prompt: TokenizedPrompt) -> None:
        """The limits that hold for every prompt, however it was made."""
        if not prompt.token_ids:
            raise ValidationError("the prompt is empty; give at least one token", parameter="prompt", value=prompt.text)
        self._check_length(len(prompt.token_ids))
        check_ids("prompt_token_ids", "prompt token id", prompt.token_ids, self._vocab_size)

    def _check_length(self, count: int) -> None:
        most = self._max_model_len
        if count >= most:
            raise ValidationError(
                f"the prompt has {count} tokens; model.max_model_len={most} covers prompt and output, so at most "
                f"{most - 1} of prompt: shorten it, or raise the limit if the model allows",
                parameter="prompt",
                value=count,
            )
        if self._max_prompt_len is not None and count > self._max_prompt_len:
            raise ValidationError(
                f"the prompt has {count} tokens; with its dynamic RoPE scaling this model takes at most "
                f"{self._max_prompt_len}, and may go on beyond: shorten it",
                parameter="prompt",
                value=count,
            )

    def make_requests(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        arrival_time: float,
        *,
        priority: int = 0,
        scheduling: SchedulingHints | None = None,
    ) -> list[EngineCoreRequest]:
        """The engine's form of a checked prompt: one request, or n with the ids `0_ID`, `1_ID` ... and parent_id=ID.

        `arrival_time` is in engine-clock seconds. `scheduling` was checked by `read_hints`. Raises ValidationError for
        parameters that this model cannot meet.
        """
        hints = scheduling or SchedulingHints()
        request = dataclasses.replace(
            self._request(request_id, prompt, params, arrival_time),
            priority=priority,
            client_id=hints.client_id,
            session_id=hints.session_id,
            deadline=None if hints.deadline is None else arrival_time + hints.deadline,
            service_level=hints.service_level,
            retention=hints.retention,
            metadata=hints.metadata_values(),
        )
        return [request] if params.n == 1 else _children(request, params)

    def _request(
        self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, arrival_time: float
    ) -> EngineCoreRequest:
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos_token_ids, *(params.stop_token_ids or ()))))
        self._check(params, stop_token_ids, len(prompt.token_ids))
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=np.array(prompt.token_ids, dtype=np.int32),
            params=params,
            arrival_time=arrival_time,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos_token_ids,
            bad_words_token_ids=self._bad_words.token_ids(params.bad_words) if params.bad_words else (),
            skip_prefix_cache=bool(params.skip_reading_prefix_cache),
            cache_salt=prompt.cache_salt,
        )

    def _check(self, params: SamplingParams, stop_token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        check_params(params, stop_token_ids, vocab_size=self._vocab_size, max_logprobs=self._max_logprobs)
        room = self._max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise ValidationError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that model.max_model_len="
                f"{self._max_model_len} leaves after a prompt of {num_prompt_tokens}; lower it or shorten the prompt",
                parameter="min_tokens",
                value=params.min_tokens,
            )
        if params.extra_args and not self._has_logits_processors:
            raise ValidationError(
                f"extra_args={short(params.extra_args)}: only logits processors read it, and none is switched on; "
                "leave it out, or choose one with logits_processors=[NAME]",
                parameter="extra_args",
                value=params.extra_args,
            )


def _children(parent: EngineCoreRequest, params: SamplingParams) -> list[EngineCoreRequest]:
    """Made from the checked parent, so that each ends where a request of its own would."""
    others = dataclasses.replace(params, prompt_logprobs=None)  # the first brings them for all
    return [
        dataclasses.replace(
            parent,
            request_id=f"{index}_{parent.request_id}",
            parent_id=parent.request_id,
            params=(others if index else params).child(index),
        )
        for index in range(params.n)
    ]


def _opened(prompt: Mapping[str, object]) -> tuple[str | Sequence[int], str | None]:
    """(text or token ids, cache salt) of a prompt that was given as a dict."""
    allowed = ("prompt", "prompt_token_ids", "cache_salt")
    for name in prompt:
        if name not in allowed:
            raise ValidationError(
                f"a prompt given as a dict has no key {short(name)}{did_you_mean(str(name), allowed)}; allowed: "
                f"{', '.join(allowed)}",
                parameter="prompt",
                value=prompt,
            )
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT):
        raise ValidationError(
            f"cache_salt={short(salt)} is not valid: it must be text of 1 to {MAX_SALT} characters",
            parameter="cache_salt",
            value=salt,
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if isinstance(text, str) and ids is None:
        return text, salt
    if text is None and isinstance(ids, Sequence) and not isinstance(ids, str):
        return cast("Sequence[int]", ids), salt
    raise ValidationError(
        f"a prompt given as a dict has one key of 'prompt' (text) and 'prompt_token_ids' (a list of ints), besides "
        f"'cache_salt'; got {short(dict(prompt))}",
        parameter="prompt",
        value=prompt,
    )


def _as_sequence(prompt: object) -> Sequence[object]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValidationError(
            f"a prompt is text, a list of token ids, or a dict with one of them; got {type(prompt).__name__}",
            parameter="prompt",
            value=prompt,
        )
    return prompt


def _token_ids(prompt: Sequence[int]) -> list[int]:
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValidationError(
                f"prompt token ids are integers; got {short(token_id)}", parameter="prompt_token_ids", value=token_id
            )
    return list(prompt)
