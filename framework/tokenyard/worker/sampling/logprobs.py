"""Log probabilities of tokens, from raw logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.runner_output import Logprobs
from tokenyard.worker.sampling.running_sums import rows_at_once
from tokenyard.worker.sampling.selection import largest
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray

_SMALLEST = float(np.finfo(np.float32).min)


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> Logprobs:
    """Log-softmax of logits [N, V] float32 at `token_ids` [N] int64 and at each row's `num_top` most likely tokens.

    -1, or more than there are, stands for the whole vocabulary. Equally likely tokens stand in order of their ids, and
    ranks count in that order: a token among the most likely ones has the rank at which it stands there. The logits are
    not written to. All results are finite, whatever the logits are.
    """
    vocab_size = logits.shape[-1]
    counts = np.array([count if 0 <= count < vocab_size else vocab_size for count in num_top], dtype=np.int64)
    width = 1 + int(counts.max(initial=0))
    table = _Table(len(counts), width)
    size = rows_at_once(logits)
    for count in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == count)
        for part in np.split(rows, range(size, len(rows), size)):
            index = to_device(part, logits.device)
            table.fill(part, logits.index_select(0, index), token_ids.index_select(0, index), count)
    return Logprobs(
        rows=np.arange(len(counts), dtype=np.int32),
        token_ids=table.token_ids,
        logprobs=table.logprobs,
        sampled_ranks=table.ranks,
    )


class _Table:
    """The columns of a Logprobs, filled some rows at a time."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.token_ids: IntArray = np.full((num_rows, width), -1, dtype=np.int32)
        self.logprobs: NDArray[np.float32] = np.full((num_rows, width), _SMALLEST, dtype=np.float32)
        self.ranks: IntArray = np.zeros(num_rows, dtype=np.int32)

    def fill(self, rows: NDArray[np.int64], logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> None:
        """`rows` from their logits [rows, V] and own tokens [rows]; the same `count` for all."""
        logits.nan_to_num_(nan=_SMALLEST, posinf=-_SMALLEST, neginf=_SMALLEST)
        shown = torch.cat([token_ids[:, None], _most_likely(logits, count)], dim=-1)
        logprobs = logits.log_softmax(dim=-1).gather(-1, shown)
        self.token_ids[rows, : 1 + count] = shown.int().cpu().numpy()
        self.logprobs[rows, : 1 + count] = logprobs.clamp_(min=_SMALLEST).cpu().numpy()
        self.ranks[rows] = _ranks(logits, token_ids).int().cpu().numpy()


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[N, count] int64 token ids, most likely first, lower ids first among equals."""
    if not count:
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    if count == logits.shape[-1]:
        return logits.sort(dim=-1, descending=True, stable=True).indices
    floors = largest(logits, count)[:, -1:]
    rows, token_ids = (logits >= floors).nonzero(as_tuple=True)  # by id; more than `count` where some are equal
    counts = torch.bincount(rows, minlength=len(logits))
    places = torch.arange(len(rows), device=logits.device) - (counts.cumsum(0) - counts)[rows]
    ids = torch.zeros((len(logits), int(counts.max())), dtype=torch.int64, device=logits.device)
    values = torch.full(ids.shape, -torch.inf, device=logits.device)
    ids[rows, places] = token_ids
    values[rows, places] = logits[rows, token_ids]
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return ids.gather(-1, order)


def _ranks(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """[N] int64, 1 = most likely; among equals the lower id ranks first."""
    own = logits.gather(-1, token_ids[:, None])
    found = torch.empty_like(logits)  # 0 and 1: comparisons into float32, and their sums, are several times as fast
    above = torch.gt(logits, own, out=found).sum(dim=-1)
    ids = torch.arange(logits.shape[-1], dtype=torch.float32, device=logits.device)
    is_lower = torch.lt(ids, token_ids[:, None].float(), out=torch.empty_like(logits))
    equal = torch.eq(logits, own, out=found).mul_(is_lower).sum(dim=-1)
    return (above + equal).long() + 1
