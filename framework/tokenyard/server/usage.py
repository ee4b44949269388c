"""Usage: how many tokens a request took, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tokenyard.engine.input_processor import TokenizedPrompt
    from tokenyard.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens."""

    cached_tokens: int  # that the prefix cache saved


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Each prompt counts once, however many choices it has; completion tokens are those of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """Of finished outputs, one a prompt."""
    prompt_tokens = completion_tokens = cached_tokens = 0
    for output in outputs:
        prompt_tokens += len(output.prompt_token_ids)
        completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        cached_tokens += output.num_cached_tokens
    return _usage(prompt_tokens, completion_tokens, cached_tokens)


class UsageCount:
    """The same of a stream, as its deltas come."""

    def __init__(self, prompts: Sequence[TokenizedPrompt]) -> None:
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._completion_tokens = 0
        self._cached = [0] * len(prompts)

    def add(self, prompt_index: int, delta: RequestOutput) -> None:
        """Take in one delta of the prompt with that index."""
        for choice in delta.outputs:
            self._completion_tokens += len(choice.token_ids)
        self._cached[prompt_index] = delta.num_cached_tokens

    def usage(self) -> Usage:
        """So far; prompts count from the start."""
        return _usage(self._prompt_tokens, self._completion_tokens, sum(self._cached))


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens),
    )
