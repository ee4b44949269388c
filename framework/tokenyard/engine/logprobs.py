"""Logprobs as users see them, from the arrays that come out of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.outputs import Logprob, LogprobsOfPosition

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.runner_output import Logprobs, PromptLogprobs

_LOWEST = float(np.finfo(np.float32).min)
_PADDING = -1
_NO_TEXT: tuple[None, None] = (None, None)


class TokenTexts:
    """(text, bytes) of tokens in the middle of a text; an incomplete character is U+FFFD in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is None:
            data = self._tokenizer.token_bytes(token_id)
            known = self._known[token_id] = (data.decode("utf-8", "replace"), data)
        return known


class StepLogprobs:
    """Logprobs of one step, or of one chunk of a prompt, found by the token that they belong to."""

    def __init__(self, logprobs: Logprobs, texts: TokenTexts) -> None:
        self._texts = texts
        self._token_ids: list[list[int]] = logprobs.token_ids.tolist()
        # An executor that says -inf all the same would break what reads it as JSON.
        self._logprobs: list[list[float]] = np.maximum(logprobs.logprobs, _LOWEST).tolist()
        self._ranks: list[int] = logprobs.sampled_ranks.tolist()
        self._rows: Mapping[int, int] = {token: row for row, token in enumerate(logprobs.rows.tolist())}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, token: int) -> bool:
        return token in self._rows

    def own(self, token: int) -> float:
        """Logprob of the token itself."""
        return self._logprobs[self._rows[token]][0]

    def position(self, token: int, *, with_text: bool) -> LogprobsOfPosition:
        """By token id: the token itself, then the most likely ones, most likely first; a token comes once."""
        row = self._rows[token]
        ranks = (self._ranks[row], *range(1, len(self._token_ids[row])))
        found: LogprobsOfPosition = {}
        for token_id, logprob, rank in zip(self._token_ids[row], self._logprobs[row], ranks, strict=True):
            if token_id != _PADDING and token_id not in found:
                text, data = self._texts[token_id] if with_text else _NO_TEXT
                found[token_id] = Logprob(logprob=logprob, rank=rank, decoded_token=text, token_bytes=data)
        return found


class CompletionLogprobs:
    """Of the tokens of one completion."""

    def __init__(self, *, with_text: bool) -> None:
        self._with_text = with_text
        self.positions: list[LogprobsOfPosition] = []
        self.cumulative = 0.0

    def add(self, step: StepLogprobs | None, tokens: Sequence[int]) -> None:
        """Take in the next tokens, given as indices into the step's token ids.

        One that the step has no logprobs of, as of a request that failed in it, gets an empty position.
        """
        for token in tokens:
            if step is not None and token in step:
                self.cumulative += step.own(token)
                self.positions.append(step.position(token, with_text=self._with_text))
            else:
                self.positions.append({})


class PromptLogprobsTaken:
    """Of the tokens of one prompt; the first has none, and others have none until their chunk has come."""

    def __init__(self, num_tokens: int, *, with_text: bool) -> None:
        self._with_text = with_text
        self.positions: list[LogprobsOfPosition | None] = [None] * num_tokens

    def add(self, chunk: PromptLogprobs, texts: TokenTexts) -> None:
        """Take in a chunk. One comes again after a preemption, and from each completion of the prompt."""
        step = StepLogprobs(chunk.logprobs, texts)
        for place in range(len(step)):
            position = chunk.start + place
            if self.positions[position] is None:
                self.positions[position] = step.position(place, with_text=self._with_text)
