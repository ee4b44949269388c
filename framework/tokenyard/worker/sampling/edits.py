"""Edits: all that changes logits between the model and the choice of tokens, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.worker.sampling.masks import AllowedTokens, BadWords, BannedTokens, LogitBias
from tokenyard.worker.sampling.penalties import OutputPenalties, RepetitionPenalty
from tokenyard.worker.sampling.processors import RowProcessors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tokenyard.arrays import IntArray
    from tokenyard.worker.input_batch import SampledRequest
    from tokenyard.worker.sampling.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What no row of the batch asks for is None and costs nothing."""

    allowed: AllowedTokens | None
    banned: BannedTokens | None
    bad_words: BadWords | None
    bias: LogitBias | None
    processors: RowProcessors | None
    repetition: RepetitionPenalty | None
    output: OutputPenalties | None

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int, device: torch.device) -> Edits:
        """Of the rows of a batch."""
        return cls(
            allowed=AllowedTokens.of(requests, vocab_size, device),
            banned=BannedTokens.of(requests, vocab_size),
            bad_words=BadWords.of(requests, vocab_size),
            bias=LogitBias.of(requests, vocab_size, device),
            processors=RowProcessors.of(requests),
            repetition=RepetitionPenalty.of(requests),
            output=OutputPenalties.of(requests),
        )

    @property
    def is_empty(self) -> bool:
        """Whether no row asks for anything, so that `apply` would change nothing."""
        masks = (self.allowed, self.banned, self.bad_words, self.bias)
        return all(edit is None for edit in (*masks, self.processors, self.repetition, self.output))

    @property
    def need_history(self) -> bool:
        """Whether `apply` asks for tokens that rows have so far."""
        edits = (self.bad_words, self.processors, self.repetition, self.output)
        return any(edit is not None for edit in edits)

    def apply(self, logits: torch.Tensor, positions: IntArray, history: History) -> dict[int, str]:
        """Change logits [N, V] in place; row -> why its logits processor failed."""
        self._mask(logits, positions, history)
        if self.bias is not None:
            self.bias.apply(logits)
        errors = {} if self.processors is None else self.processors.apply(logits, history)
        if self.repetition is not None:
            self.repetition.apply(logits, history)
        if self.output is not None:
            self.output.apply(logits, history)
        return errors

    def _mask(self, logits: torch.Tensor, positions: IntArray, history: History) -> None:
        if self.allowed is not None:
            self.allowed.apply(logits)
        if self.banned is not None:
            self.banned.apply(logits, positions)
        if self.bad_words is not None:
            self.bad_words.apply(logits, history)
