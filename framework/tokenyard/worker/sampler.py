"""Sampler: from logits to tokens, for a whole batch at once. N = rows, V = vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.runner_output import NO_TOKEN_LEFT
from tokenyard.worker.sampling.batch import SamplingBatch
from tokenyard.worker.sampling.logprobs import token_logprobs
from tokenyard.worker.sampling.selection import argmax
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from tokenyard.arrays import IntArray
    from tokenyard.runner_output import Logprobs
    from tokenyard.worker.input_batch import SampledRequest
    from tokenyard.worker.sampling.batch import LogprobRows
    from tokenyard.worker.sampling.history import History

__all__ = ["NOT_FINITE", "Chosen", "Sampled", "Sampler", "SamplingBatch", "token_logprobs"]

NOT_FINITE = "the model's logits are not finite numbers: its weights are damaged, or too large for this dtype"


class Sampled(NamedTuple):
    """The tokens of N rows."""

    token_ids: IntArray  # [N] int32; 0 where a row failed
    logprobs: Logprobs | None  # of the rows that ask and did not fail; its rows index the N
    errors: Mapping[int, str]  # row -> why it alone failed


class Chosen(NamedTuple):
    """The tokens of N rows on the device, and what is needed to tell which of them are none."""

    token_ids: torch.Tensor  # [N] int64, within the vocabulary even where no token can be chosen
    greatest: torch.Tensor  # [N] float32, of each row's raw logits: NaN when any is NaN
    left: torch.Tensor | None  # [N] float32 the same after edits; None = there were none
    raw: torch.Tensor | None  # [L, V] raw logits of the rows that ask for log probabilities
    failed: Mapping[int, str]  # row -> why its logits processor failed

    @property
    def results(self) -> list[torch.Tensor]:
        """What the host reads, as `Sampler.finish` takes it."""
        return [self.token_ids, self.greatest] if self.left is None else [self.token_ids, self.greatest, self.left]


class Sampler:
    """A row's token depends on its own logits, parameters and seed, never on other rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def choose(self, logits: torch.Tensor, batch: SamplingBatch, positions: IntArray, history: History) -> Chosen:
        """Tokens for `positions` [N], from logits [N, V] float32, which may be written to.

        `history(row)` are the row's tokens before its position, int32 [positions[row]]. It is asked for rows with
        penalties, bad words or a logits processor only. Nothing is read back from the device, but to rank tokens for
        `top_p`, or for more of `top_k` than are ranked at first; a logits processor may read what it likes.
        """
        asked = batch.logprobs
        raw = None if asked is None else logits[to_device(asked.rows, self._device)]  # before they change
        greatest = logits.amax(dim=-1)
        if batch.edits.is_empty:
            return Chosen(self._choose(logits, greatest, batch, positions), greatest, None, raw, {})
        failed = batch.edits.apply(logits, positions, history)
        left = logits.amax(dim=-1)
        return Chosen(self._choose(logits, left, batch, positions), greatest, left, raw, failed)

    @staticmethod
    def finish(chosen: Chosen, results: Sequence[np.ndarray], batch: SamplingBatch, positions: IntArray) -> Sampled:
        """What was chosen, from the host's copy of `chosen.results`. Reads nothing from the device without logprobs."""
        errors = {row: NOT_FINITE for row, _ in _not_finite(results[1])}
        errors = {**chosen.failed, **errors}
        for row, value in _not_finite(results[2]) if len(results) > 2 else ():
            errors.setdefault(row, _why_none(batch.requests[row], int(positions[row]), value))
        token_ids = results[0].astype(np.int32)
        token_ids[list(errors)] = 0
        if batch.logprobs is None or chosen.raw is None:
            return Sampled(token_ids, None, errors)
        return Sampled(token_ids, _logprobs(chosen.raw, batch.logprobs, token_ids, errors), errors)

    def _choose(
        self, logits: torch.Tensor, greatest: torch.Tensor, batch: SamplingBatch, positions: IntArray
    ) -> torch.Tensor:
        if batch.drawn is None:
            return argmax(logits)
        if batch.drawn.index is None:
            return batch.drawn.draw(logits, greatest, positions)
        return argmax(logits).index_copy(0, batch.drawn.index, batch.drawn.draw(logits, greatest, positions))


def _not_finite(greatest: np.ndarray) -> list[tuple[int, float]]:
    """(row, value) of what is no finite number among the greatest logits of the rows."""
    return [(row, float(greatest[row])) for row in np.flatnonzero(~np.isfinite(greatest)).tolist()]


def _logprobs(raw: torch.Tensor, asked: LogprobRows, token_ids: IntArray, errors: Mapping[int, str]) -> Logprobs | None:
    """Of the rows that ask, whose raw logits these are, without those that failed."""
    is_good = ~np.isin(asked.rows, list(errors))
    rows = asked.rows[is_good]
    if not len(rows):
        return None
    chosen = to_device(token_ids[rows].astype(np.int64), raw.device)
    raw = raw if is_good.all() else raw[to_device(is_good, raw.device)]
    found = token_logprobs(raw, chosen, asked.num_top[is_good].tolist())
    return replace(found, rows=rows.astype(np.int32))


def _why_none(request: SampledRequest, position: int, greatest: float) -> str:
    """Why a row whose greatest logit is no finite number has no token."""
    params = request.params
    is_short = position < request.num_prompt_tokens + params.min_tokens
    causes = {
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(request.bad_words_token_ids),
        "min_tokens with its stop tokens": is_short and bool(request.stop_token_ids),
        "a logits processor": request.processor is not None,
    }
    found = [name for name, is_cause in causes.items() if is_cause]
    if greatest == -math.inf and found:
        return f"{NO_TOKEN_LEFT}: {', '.join(found)} forbid{'' if len(found) > 1 else 's'} every one"
    if request.processor is not None:
        return "its logits processor left logits that are not finite numbers"
    return "its logits are not finite numbers"
