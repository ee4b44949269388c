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
_FIRST_NAMED = 2**30  # tokens from here on stand for content of larger numbers, in order of appearance


class PromptTokens:
    """A token says which content it belongs to, so what a prefix cache finds is what the workload meant.

    `output_token` is what the engine is going to sample; it is 0. Content of small numbers costs no memory. Content
    that nobody knows costs no time either: all such prompts are views of one array.
    """

    def __init__(self, output_token: int) -> None:
        if output_token != 0:
            raise ValueError(f"content n is token n + 1, so the output's is 0; got {output_token}")
        self._named: dict[int, int] = {OUTPUT: output_token}
        self._unknown = _blank(_FIRST_CHUNK)

    def unknown(self, num_tokens: int) -> IntArray:
        """[num_tokens] of a prompt that is not told; such prompts must not meet a prefix cache."""
        if num_tokens > len(self._unknown):
            self._unknown = _blank(2 * num_tokens)
        return self._unknown[:num_tokens]

    def of(self, content: Sequence[Segment]) -> IntArray:
        """[sum of num_tokens]"""
        tokens = np.array([self._token(segment.content) for segment in content], dtype=np.int32)
        return np.repeat(tokens, [segment.num_tokens for segment in content])

    def _token(self, content: int) -> int:
        if 0 <= content < _FIRST_NAMED - 1:
            return content + 1
        return self._named.setdefault(content, _FIRST_NAMED + len(self._named) - 1)


def _blank(num_tokens: int) -> IntArray:
    blank = np.zeros(num_tokens, dtype=np.int32)
    blank.flags.writeable = False
    return blank
