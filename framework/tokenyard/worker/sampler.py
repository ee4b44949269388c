"""Sampler: from logits to tokens, for a whole batch at once. N = rows, V = vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.worker.input_batch import SampledRequest


_MASK = 2**64 - 1
_NEVER = 2**62  # a position beyond any


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMask:
    """Tokens that must not be sampled yet: M pairs of a row that has `min_tokens` and one of its stop ids."""

    rows: LongArray  # [M]
    token_ids: LongArray  # [M]
    until: LongArray  # [M] the first position at which the row's stop ids are allowed

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int) -> StopMask | None:
        """None when no row has a stop id to wait with. A row whose every token is a stop id cannot wait."""
        pairs = []
        for row, request in enumerate(requests):
            if not request.params.min_tokens:
                continue
            # A model's config may name EOS ids that its vocabulary has not.
            stop_ids = sorted({token_id for token_id in request.stop_token_ids if 0 <= token_id < vocab_size})
            until = min(request.num_prompt_tokens + request.params.min_tokens, _NEVER)
            if len(stop_ids) < vocab_size:
                pairs += [(row, token_id, until) for token_id in stop_ids]
        if not pairs:
            return None
        rows, token_ids, until_positions = np.array(pairs, dtype=np.int64).T
        return cls(rows=rows, token_ids=token_ids, until=until_positions)

    def apply(self, logits: torch.Tensor, positions: IntArray) -> None:
        """Put -inf in place at what the rows, whose tokens get these positions, must not sample."""
        active = positions[self.rows] < self.until
        if active.any():
            where = (torch.from_numpy(self.rows[active]), torch.from_numpy(self.token_ids[active]))
            logits[tuple(index.to(logits.device) for index in where)] = -torch.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling parameters of N rows as columns; made anew only when the batch changes."""

    is_greedy: torch.Tensor  # [N] bool
    temperature: torch.Tensor  # [N] float32, 1 where greedy
    top_k: torch.Tensor | None  # [N] int64, V where unlimited; None when no row limits
    top_p: torch.Tensor | None  # [N] float32, 1 where unlimited; None when no row limits
    all_greedy: bool
    seeded: tuple[tuple[int, int], ...]  # (row, seed) of sampling rows with a seed of their own
    stop_mask: StopMask | None

    @classmethod
    def of(cls, requests: Sequence[SampledRequest], vocab_size: int, device: torch.device) -> SamplingBatch:
        """Columns from what the rows' requests ask for."""
        params = [request.params for request in requests]
        greedy = [row.is_greedy for row in params]
        top_k = [min(row.top_k, vocab_size) if row.top_k > 0 else vocab_size for row in params]
        top_p = [row.top_p for row in params]
        return cls(
            is_greedy=torch.tensor(greedy, device=device),
            temperature=torch.tensor([row.temperature or 1.0 for row in params], device=device),
            top_k=torch.tensor(top_k, device=device) if min(top_k) < vocab_size else None,
            top_p=torch.tensor(top_p, device=device) if min(top_p) < 1.0 else None,
            all_greedy=all(greedy),
            seeded=tuple(
                (index, row.seed) for index, row in enumerate(params) if row.seed is not None and not row.is_greedy
            ),
            stop_mask=StopMask.of(requests, vocab_size),
        )

    def seeds(self, positions: IntArray) -> dict[int, int]:
        """Seeds of this step's draws, for the rows that do not share the engine's randomness."""
        return {row: draw_seed(seed, int(positions[row])) for row, seed in self.seeded}


class Sampler:
    """A row's token depends on its own logits, parameters and seed, never on other rows."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._shared = torch.Generator(device=device).manual_seed(seed)
        self._own = torch.Generator(device=device)  # seeded anew for each draw of a row with a seed

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, positions: IntArray) -> torch.Tensor:
        """Tokens [N] int64 for `positions` [N], from logits [N, V] float32, which may be written to."""
        if batch.stop_mask is not None:
            batch.stop_mask.apply(logits, positions)
        greedy = logits.argmax(dim=-1)
        if batch.all_greedy:
            return greedy
        probabilities = _limited(logits / batch.temperature[:, None], batch).softmax(dim=-1)
        # argmax(p / e) with e ~ Exp(1) draws from p (the Gumbel-max trick in another form) without a sync or a loop.
        noise = torch.empty_like(probabilities)
        seeds = batch.seeds(positions)
        if len(seeds) < len(probabilities):
            noise.exponential_(generator=self._shared)
        for row, seed in seeds.items():
            noise[row].exponential_(generator=self._own.manual_seed(seed))
        return torch.where(batch.is_greedy, greedy, (probabilities / noise).argmax(dim=-1))


def draw_seed(seed: int, position: int) -> int:
    """The seed of one draw: a request's token at `position` is the same whatever ran, or was preempted, before.

    splitmix64 (Steele, Lea, Flood 2014): generators that keep only the low bits of a seed still get unlike ones.
    """
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1  # torch takes signed 64-bit seeds


def _limited(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Logits with everything outside top-k and top-p at -inf; only the rows that ask are sorted."""
    if batch.top_k is None and batch.top_p is None:
        return logits
    limited = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if batch.top_k is not None:
        limited |= batch.top_k < logits.shape[-1]
    if batch.top_p is not None:
        limited |= batch.top_p < 1.0
    rows = (limited & ~batch.is_greedy).nonzero().squeeze(-1)
    if not len(rows):
        return logits
    logits = logits.clone()
    logits[rows] = _limit_rows(
        logits[rows],
        batch.top_k[rows] if batch.top_k is not None else None,
        batch.top_p[rows] if batch.top_p is not None else None,
    )
    return logits


def _limit_rows(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    ordered, index = logits.sort(dim=-1, descending=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        drop |= torch.arange(ordered.shape[-1], device=logits.device) >= top_k[:, None]
    if top_p is not None:
        # Probabilities after top-k: the two limits apply one after the other.
        probabilities = ordered.masked_fill(drop, -torch.inf).softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        drop |= before >= top_p[:, None]  # the most likely token has 0 before it and always stays
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, index, drop), -torch.inf)
