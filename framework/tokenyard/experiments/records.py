"""RunRecord: what a run of a workload came to, in columns; live runs and simulated ones make the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

REQUEST_COLUMNS = (
    "id",
    "client",
    "arrival",
    "first_scheduled",
    "first_token",
    "finish",
    "prompt",
    "output",
    "cached",
    "preemptions",
    "recomputed",
)
"""The columns of a request table, in their order. Times are seconds since the start of the workload."""

STEP_COLUMNS = ("step", "start", "end", "running", "waiting", "prefill_tokens", "decode_tokens", "used_blocks")


class RequestStatus(IntEnum):
    """How a request of a workload ended."""

    FINISHED = 0
    REJECTED = 1  # never ran, or failed
    ABORTED = 2  # past its deadline
    UNFINISHED = 3  # the run ended before it


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTable:
    """N requests in order of arrival. A time that never came is NaN."""

    id: NDArray[np.int64]  # [N] 0, 1, ...
    client: NDArray[np.int32]  # [N] index into `clients`, -1 = none
    clients: tuple[str, ...]
    session: NDArray[np.int32]  # [N] index into `sessions`, -1 = none
    sessions: tuple[str, ...]
    arrival: NDArray[np.float64]  # [N]
    first_scheduled: NDArray[np.float64]  # [N] when its first step began
    first_token: NDArray[np.float64]  # [N]
    finish: NDArray[np.float64]  # [N] last token; of one that was aborted or rejected, when that was
    prompt: NDArray[np.int32]  # [N] tokens
    output: NDArray[np.int32]  # [N] tokens that it got
    cached: NDArray[np.int32]  # [N] prompt tokens that the prefix cache saved, at its first admission
    preemptions: NDArray[np.int32]  # [N] how often it lost its turn or its blocks
    recomputed: NDArray[np.int32]  # [N] tokens that were computed for a second or further time
    priority: NDArray[np.int64]  # [N]
    deadline: NDArray[np.float64]  # [N] seconds since the start of the workload, NaN = none
    status: NDArray[np.int8]  # [N] a RequestStatus

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGaps:
    """All times between two tokens of a request, over all requests, with how often each came."""

    seconds: NDArray[np.float64]  # [G] in any order
    counts: NDArray[np.int64]  # [G]
    relative_error: float = 0.0  # of the values: above 0 where there were too many to keep each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """S steps, in order. Times are seconds since the start of the workload."""

    start: NDArray[np.float64]  # [S]
    end: NDArray[np.float64]  # [S]
    running: NDArray[np.int32]  # [S] requests that ran in it
    waiting: NDArray[np.int32]  # [S] requests that had arrived, had not ended and did not run
    prefill_tokens: NDArray[np.int32]  # [S]
    decode_tokens: NDArray[np.int32]  # [S]
    used_blocks: NDArray[np.int32]  # [S] K/V blocks that requests hold, once it is done

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Sums over all steps of a run. What a target does not tell is None."""

    num_steps: int | None
    num_computed_tokens: int | None  # of all steps
    num_preemptions: int | None
    busy_seconds: float | None  # that steps took
    mean_kv_usage: float | None  # share of the blocks that requests held, over the time of the steps
    max_kv_usage: float | None
    mean_batch_size: float | None  # requests a step
    mean_budget_usage: float | None  # share of scheduler.max_num_batched_tokens, over the steps
    scheduler_seconds: float | None  # wall time of everything but the executor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Everything that metrics and reports are made of."""

    requests: RequestTable
    gaps: TokenGaps
    totals: RunTotals
    steps: StepTable | None = None  # where it was asked for
    facts: Mapping[str, object] = field(default_factory=dict)  # config, versions, seed, loop: what makes it repeatable
