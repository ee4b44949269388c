"""Log probabilities of prompt tokens, from the hidden states of a step.

N = prompt tokens of one row, M = of all rows that ask, K = the most likely tokens that a request asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.runner_output import Logprobs, PromptLogprobs
from tokenyard.worker.sampler import token_logprobs
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenyard.arrays import BoolArray
    from tokenyard.worker.input_batch import PromptRows

SLICE_BYTES = 24 << 20  # of logits at a time; what is computed of them takes a few times as much


def slices(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    """Which of the M tokens have their logits at a time."""
    size = max(1, SLICE_BYTES // (4 * vocab_size))
    for start in range(0, num_tokens, size):
        yield slice(start, start + size)


class _Chunk:
    """What becomes of one row's tokens: numbers offset .. offset + N of the M."""

    def __init__(self, rows: PromptRows, offset: int, vocab_size: int) -> None:
        count, wanted = len(rows.token_ids), rows.request.params.prompt_logprobs or 0
        self.rows = rows
        self.is_finite = True
        self.num_top = vocab_size if wanted < 0 else min(wanted, vocab_size)
        self._offset = offset
        self._logprobs = Logprobs(
            rows=np.arange(count, dtype=np.int32),
            token_ids=np.empty((count, 1 + self.num_top), dtype=np.int32),
            logprobs=np.empty((count, 1 + self.num_top), dtype=np.float32),
            sampled_ranks=np.empty(count, dtype=np.int32),
        )

    def take(self, found: Logprobs, is_finite: BoolArray, start: int) -> None:
        """Keep what a slice of the M tokens, from number `start` on, has of this row's."""
        first = max(self._offset, start)
        end = min(self._offset + len(self.rows.token_ids), start + len(is_finite))
        if first >= end:
            return
        here, there = slice(first - self._offset, end - self._offset), slice(first - start, end - start)
        own = self._logprobs
        own.token_ids[here] = found.token_ids[there, : 1 + self.num_top]
        own.logprobs[here] = found.logprobs[there, : 1 + self.num_top]
        own.sampled_ranks[here] = found.sampled_ranks[there]
        self.is_finite &= bool(is_finite[there].all())

    def result(self) -> PromptLogprobs:
        request_id = self.rows.request.request_id
        return PromptLogprobs(request_id=request_id, start=self.rows.start, logprobs=self._logprobs)


def prompt_logprobs(
    asked: Sequence[PromptRows],
    states: torch.Tensor,  # [M, ...] in the order of `asked`
    to_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> tuple[list[PromptLogprobs], list[int]]:
    """The chunks, and which rows of the step have none since their logits are not finite numbers.

    Logits exist for a slice of the tokens at a time: a long prompt's would fill the memory.
    """
    counts = [len(rows.token_ids) for rows in asked]
    offsets = np.cumsum([0, *counts]).tolist()
    chunks = [_Chunk(rows, offset, vocab_size) for rows, offset in zip(asked, offsets, strict=False)]
    num_top = np.repeat([chunk.num_top for chunk in chunks], counts).tolist()
    token_ids = to_device(np.concatenate([rows.token_ids for rows in asked]).astype(np.int64), states.device)
    for part in slices(len(num_top), vocab_size):
        logits = to_logits(states[part])
        is_finite: BoolArray = torch.isfinite(logits.amax(dim=-1)).cpu().numpy()
        found = token_logprobs(logits, token_ids[part], num_top[part])
        for chunk in chunks:
            chunk.take(found, is_finite, part.start)
    results = [chunk.result() for chunk in chunks if chunk.is_finite]
    return results, [chunk.rows.row for chunk in chunks if not chunk.is_finite]
