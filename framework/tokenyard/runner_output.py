"""ModelRunnerOutput: what an executor returns for one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray


NO_TOKEN_LEFT = "no token is left to sample"  # noqa: S105  # of a vocabulary
"""How the error of a request begins whose parameters forbid every token (since API 1.5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities of N positions; sparse: only rows that asked have some.

    They are those of the model's own logits, before penalties, masks and temperature. Column 0 is the position's own
    token (the sampled one, or the prompt's); then come the most likely tokens, most likely first. A position that asked
    for fewer than the others is padded with token id -1. All are finite: what underflows is the smallest float32.
    """

    rows: IntArray  # [N] which sampled token each belongs to, as an index into the ragged token_ids
    token_ids: IntArray  # [N, 1 + K]
    logprobs: NDArray[np.float32]  # [N, 1 + K] natural logarithms
    sampled_ranks: IntArray  # [N] rank of column 0 among the whole vocabulary, 1 = most likely


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """One chunk of a request's prompt logprobs: of the prompt tokens at start .. start + N.

    The first prompt token has none, so `start` is at least 1. A chunk may come again after a preemption.
    """

    request_id: str
    start: int
    logprobs: Logprobs  # its rows count from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """Results of one step, in the row order of its SchedulerOutput (R rows)."""

    step: int
    num_sampled: IntArray  # [R] tokens sampled per row: 0 in mid-prefill, more than 1 under speculation
    token_ids: IntArray  # [sum(num_sampled)] ragged, rows one after another
    logprobs: Logprobs | None = None
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    draft_token_ids: Sequence[IntArray] | None = None  # [R] drafts for the next step
    pooled: Mapping[str, object] = field(default_factory=dict)  # request id -> pooled hidden state
    finished_kv_transfers: Sequence[str] = ()
    # Request id -> why it alone failed in this step. One that begins with NO_TOKEN_LEFT is its own parameters' doing.
    errors: Mapping[str, str] = field(default_factory=dict)
