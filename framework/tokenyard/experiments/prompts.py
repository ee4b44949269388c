"""Prompts of a workload as token ids: equal segments give equal tokens, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.workload import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.workload import Segment

_FIRST_CHUNK = 4096  # tokens


class PromptTokens:
    """A token says which content it belongs to, so what a prefix cache finds is what the workload meant.

    `output_token` is what the engine is going to sample. Content that nobody knows costs nothing: all such prompts are
    views of one array.
    """

    def __init__(self, output_token: int) -> None:
        self._tokens: dict[int, int] = {OUTPUT: output_token}
        self._next = output_token + 1
        self._unknown = self._blank(_FIRST_CHUNK)

    def unknown(self, num_tokens: int) -> IntArray:
        """[num_tokens] of a prompt that is not told; such prompts must not meet a prefix cache."""
        if num_tokens > len(self._unknown):
            self._unknown = self._blank(2 * num_tokens)
        return self._unknown[:num_tokens]

    def of(self, content: Sequence[Segment]) -> IntArray:
        """[sum of num_tokens]"""
        tokens = np.array([self._token(segment.content) for segment in content], dtype=np.int32)
        return np.repeat(tokens, [segment.num_tokens for segment in content])

    def _token(self, content: int) -> int:
        token = self._tokens.get(content)
        if token is None:
            token = self._tokens[content] = self._next
            self._next += 1
        return token

    def _blank(self, num_tokens: int) -> IntArray:
        blank = np.full(num_tokens, self._next, dtype=np.int32)
        blank.flags.writeable = False
        return blank
