"""SamplingBatch: what the rows of a batch ask for, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.worker.sampling.draws import Streams, pick, request_seed
from tokenyard.worker.sampling.edits import Edits
from tokenyard.worker.sampling.limits import Limits
from tokenyard.worker.sampling.running_sums import softmax_
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.worker.input_batch import SampledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRows:
    """The S rows that are not greedy."""

    rows: LongArray  # [S]
    index: torch.Tensor | None  # [S] the same on the device; None = all rows of the batch
    temperature: torch.Tensor  # [S, 1] float32
    limits: Limits | None
    streams: Streams

    @classmethod
    def of(
        cls, requests: Sequence[SampledRequest], vocab_size: int, device: torch.device, seed: int
    ) -> DrawnRows | None:
        """None when all rows are greedy."""
        rows = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        if not rows:
            return None
        params = [requests[row].params for row in rows]
        return cls(
            rows=np.array(rows, dtype=np.int64),
            index=to_device(torch.tensor(rows), device) if len(rows) < len(requests) else None,
            temperature=to_device(torch.tensor([[row.temperature] for row in params], dtype=torch.float32), device),
            limits=Limits.of(params, vocab_size, device),
            streams=Streams([request_seed(seed, requests[row]) for row in rows]),
        )

    def draw(self, logits: torch.Tensor, greatest: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """[S] int64 tokens of the batch's logits [N, V], which may be written to; `greatest` [N] of each row."""
        if self.index is not None:
            logits, greatest = logits.index_select(0, self.index), greatest.index_select(0, self.index)
        scaled = logits.sub_(greatest[:, None]).div_(self.temperature)  # at most 0: it cannot overflow
        probabilities = softmax_(scaled)
        if self.limits is not None:
            self.limits.apply(probabilities)
        return pick(probabilities, to_device(self.streams.uniforms(positions[self.rows]), logits.device))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """The L rows that ask for log probabilities."""

    rows: LongArray  # [L]
    num_top: LongArray  # [L] how many of the most likely tokens; -1 = all

    @classmethod
    def of(cls, requests: Sequence[SampledRequest]) -> LogprobRows | None:
        """None when nobody asks."""
        asked = ((row, request.params.logprobs) for row, request in enumerate(requests))
        num_top = {row: count for row, count in asked if count is not None}
        if not num_top:
            return None
        return cls(rows=np.array([*num_top], dtype=np.int64), num_top=np.array([*num_top.values()], dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling parameters of N rows as columns; made anew only when the batch changes."""

    requests: tuple[SampledRequest, ...]  # [N]
    edits: Edits
    drawn: DrawnRows | None
    logprobs: LogprobRows | None

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int, device: torch.device, seed: int) -> SamplingBatch:
        """Columns from what the rows' requests ask for; `seed` is the engine's, for requests without their own."""
        return cls(
            requests=tuple(requests),
            edits=Edits.of(requests, vocab_size, device),
            drawn=DrawnRows.of(requests, vocab_size, device, seed),
            logprobs=LogprobRows.of(requests),
        )
