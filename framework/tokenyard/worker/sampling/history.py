"""The tokens that rows have so far, as pairs of a row and a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tokenyard.arrays import IntArray, LongArray
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    import torch

History: TypeAlias = Callable[[int], IntArray]
"""All tokens of a row that are known, prompt and output, as a read-only view."""


class Pairs(NamedTuple):
    """M places in logits [N, V]."""

    rows: LongArray  # [M]
    token_ids: LongArray  # [M]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Pairs:
        """From one (row, token id) after the other."""
        rows, token_ids = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(rows, token_ids)

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """As an index into logits."""
        return (to_device(self.rows, device), to_device(self.token_ids, device))


class HistoryTokens(NamedTuple):
    """Tokens of some rows, one row after the other."""

    owners: LongArray  # [M] index into the rows that were asked for
    token_ids: LongArray  # [M] those of the vocabulary


def tokens_of(rows: LongArray, starts: LongArray, history: History, vocab_size: int) -> HistoryTokens:
    """What `rows` have from position `starts` on. Prompt tokens that the model cannot sample are left out."""
    parts = [history(row)[start:] for row, start in zip(rows.tolist(), starts.tolist(), strict=True)]
    owners = np.repeat(np.arange(len(rows)), [len(part) for part in parts])
    token_ids = np.concatenate(parts).astype(np.int64)
    known = token_ids < vocab_size
    return HistoryTokens(owners, token_ids) if known.all() else HistoryTokens(owners[known], token_ids[known])
