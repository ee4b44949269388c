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
        self._eos_token_ids = tuple(eos_token_ids)

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
        """The engine's form of a checked prompt."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=np.array(prompt.token_ids, dtype=np.int32),
            params=params,
            arrival_time=arrival_time,
            stop_token_ids=() if params.ignore_eos else self._eos_token_ids,
            eos_token_ids=self._eos_token_ids,
            priority=priority,
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
