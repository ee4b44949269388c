"""InputProcessor: prompts as users give them -> EngineCoreRequest, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

import numpy as np

from tokenyard.errors import ValidationError
from tokenyard.request import EngineCoreRequest

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A checked prompt; `text` is None when it was given as token ids."""

    text: str | None
    token_ids: list[int]


class InputProcessor:
    """Knows the tokenizer and the limits of one model."""

    def __init__(
        self, *, tokenizer: Tokenizer, max_model_len: int, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        # A config may name more than the embedding has rows for: those are never sampled.
        self._eos_token_ids = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Raises ValidationError for a prompt that is empty, too long or out of the vocabulary."""
        if isinstance(prompt, Mapping):
            prompt = _only_value(prompt)
        if isinstance(prompt, str):
            tokenized = TokenizedPrompt(prompt, self._tokenizer.encode(prompt))
        else:
            tokenized = TokenizedPrompt(None, _token_ids(prompt))
        self.check(tokenized)
        return tokenized

    def check(self, prompt: TokenizedPrompt) -> None:
        """The limits that hold for every prompt, however it was made."""
        count = len(prompt.token_ids)
        if count == 0:
            raise ValidationError("the prompt is empty; give at least one token", parameter="prompt", value=prompt.text)
        if count >= self._max_model_len:
            raise ValidationError(
                f"the prompt has {count} tokens; model.max_model_len={self._max_model_len} covers prompt and output, "
                f"so at most {self._max_model_len - 1} of prompt: shorten it, or raise the limit if the model allows",
                parameter="prompt",
                value=count,
            )
        for token_id in prompt.token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ValidationError(
                    f"prompt token id {token_id} is outside the vocabulary, 0 to {self._vocab_size - 1}",
                    parameter="prompt_token_ids",
                    value=token_id,
                )

    def make_request(
        self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, arrival_time: float, priority: int = 0
    ) -> EngineCoreRequest:
        """The engine's form of a checked prompt; raises ValidationError for parameters that this model cannot meet."""
        self._check_params(params, len(prompt.token_ids))
        eos_token_ids = () if params.ignore_eos else self._eos_token_ids
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=np.array(prompt.token_ids, dtype=np.int32),
            params=params,
            arrival_time=arrival_time,
            stop_token_ids=tuple(dict.fromkeys((*eos_token_ids, *(params.stop_token_ids or ())))),
            eos_token_ids=eos_token_ids,
            priority=priority,
        )

    def _check_params(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        for token_id in params.stop_token_ids or ():
            if not 0 <= token_id < self._vocab_size:
                raise ValidationError(
                    f"stop_token_ids: token id {token_id} is outside the vocabulary, 0 to {self._vocab_size - 1}",
                    parameter="stop_token_ids",
                    value=token_id,
                )
        room = self._max_model_len - num_prompt_tokens
        if params.min_tokens > room:
            raise ValidationError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that model.max_model_len="
                f"{self._max_model_len} leaves after a prompt of {num_prompt_tokens}; lower it or shorten the prompt",
                parameter="min_tokens",
                value=params.min_tokens,
            )


def _only_value(prompt: Mapping[str, object]) -> str | Sequence[int]:
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"]
    ids = prompt.get("prompt_token_ids")
    if set(prompt) == {"prompt_token_ids"} and isinstance(ids, Sequence) and not isinstance(ids, str):
        return ids
    raise ValidationError(
        f"a prompt given as a dict has the one key 'prompt' (text) or 'prompt_token_ids' (a list of ints); "
        f"got {dict(prompt)!r}",
        parameter="prompt",
        value=prompt,
    )


def _token_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise ValidationError(
            f"a prompt is text, a list of token ids, or a dict with one of them; got {type(prompt).__name__}",
            parameter="prompt",
            value=prompt,
        )
    for token_id in prompt:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValidationError(
                f"prompt token ids are integers; got {token_id!r}", parameter="prompt_token_ids", value=token_id
            )
    return list(prompt)
