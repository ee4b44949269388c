"""Penalties on tokens that a row has already. Only the logits of such tokens are read and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.worker.sampling.history import History, Pairs, tokens_of
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.arrays import LongArray
    from tokenyard.worker.input_batch import SampledRequest

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionPenalty:
    """Divides positive logits and multiplies others, once for each token of prompt and output."""

    rows: LongArray  # [rows that have it]
    penalties: NDArray[np.float64]  # [rows that have it]

    @classmethod
    def of(cls, requests: Sequence[SampledRequest]) -> RepetitionPenalty | None:
        """None when no row has it."""
        found = [
            (row, request.params.repetition_penalty)
            for row, request in enumerate(requests)
            if request.params.repetition_penalty != 1.0
        ]
        if not found:
            return None
        rows, penalties = zip(*found, strict=True)
        return cls(rows=np.array(rows, dtype=np.int64), penalties=np.array(penalties, dtype=np.float64))

    def apply(self, logits: torch.Tensor, history: History) -> None:
        """Change logits [N, V] in place. A token that occurs several times is written as often, with one value."""
        tokens = tokens_of(self.rows, np.zeros_like(self.rows), history, logits.shape[-1])
        places = Pairs(self.rows[tokens.owners], tokens.token_ids).on(logits.device)
        penalties = to_device(self.penalties[tokens.owners], logits.device)
        old = logits[places].double()
        _write(logits, places, old, torch.where(old > 0, old / penalties, old * penalties))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPenalties:
    """Subtracts `presence_penalty` once, and `frequency_penalty` as often as the token occurs in the output."""

    rows: LongArray  # [rows that have one]
    num_prompt_tokens: LongArray  # [rows that have one]
    presence: NDArray[np.float64]  # [rows that have one]
    frequency: NDArray[np.float64]  # [rows that have one]

    @classmethod
    def of(cls, requests: Sequence[SampledRequest]) -> OutputPenalties | None:
        """None when no row has one."""
        found = [
            (row, request.num_prompt_tokens, request.params.presence_penalty, request.params.frequency_penalty)
            for row, request in enumerate(requests)
            if request.params.presence_penalty or request.params.frequency_penalty
        ]
        if not found:
            return None
        rows, num_prompt_tokens, presence, frequency = zip(*found, strict=True)
        return cls(
            rows=np.array(rows, dtype=np.int64),
            num_prompt_tokens=np.array(num_prompt_tokens, dtype=np.int64),
            presence=np.array(presence, dtype=np.float64),
            frequency=np.array(frequency, dtype=np.float64),
        )

    def apply(self, logits: torch.Tensor, history: History) -> None:
        """Change logits [N, V] in place."""
        vocab_size = logits.shape[-1]
        tokens = tokens_of(self.rows, self.num_prompt_tokens, history, vocab_size)
        distinct, counts = np.unique(tokens.owners * vocab_size + tokens.token_ids, return_counts=True)
        owners, token_ids = np.divmod(distinct, vocab_size)
        places = Pairs(self.rows[owners], token_ids).on(logits.device)
        old = logits[places].double()
        penalties = to_device(self.presence[owners] + self.frequency[owners] * counts, logits.device)
        _write(logits, places, old, old - penalties)


def _write(
    logits: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], old: torch.Tensor, new: torch.Tensor
) -> None:
    """Store float64 values as float32: no penalty forbids a token, however large, and none allows a forbidden one."""
    finite = new.clamp(-_LARGEST, _LARGEST)
    logits[places] = torch.where(old == -torch.inf, old, finite).float()
