"""ModelRunnerOutput: what an executor returns for one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities of N positions and the K most likely tokens of each; sparse: only rows that asked have some."""

    rows: IntArray  # [N] which sampled token each belongs to, as an index into the ragged token_ids
    token_ids: IntArray  # [N, K]
    logprobs: NDArray[np.float32]  # [N, K]
    sampled_ranks: IntArray  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """One chunk of a request's prompt logprobs: positions start .. start + N."""

    request_id: str
    start: int
    logprobs: Logprobs


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
    errors: Mapping[str, str] = field(default_factory=dict)  # request id -> why it alone failed in this step
