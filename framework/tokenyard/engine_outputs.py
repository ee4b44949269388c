"""EngineCoreOutputs: what one engine step tells the front end; columnar, made without touching requests one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.request import FinishReason
    from tokenyard.runner_output import Logprobs, PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """How one request ended."""

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id; None for EOS
    error: str | None = None  # for FinishReason.ERROR: what went wrong, for the user


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request that entered the running batch in this step."""

    request_id: str
    num_cached_tokens: int  # prompt tokens whose prefill the prefix cache saved
    scheduled_at: float  # engine-clock seconds: when its first step began


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start, and gauges of now."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int  # of admitted requests, cached ones included
    num_generation_tokens: int
    prefix_cache_queries: int  # prompt tokens of admitted requests
    prefix_cache_hits: int  # those of them that were not computed again
    num_free_blocks: int
    num_total_blocks: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that running requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks if self.num_total_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutputs:
    """One step's results. N = requests with new tokens."""

    request_ids: Sequence[str]  # [N]
    num_tokens: IntArray  # [N] >= 1
    token_ids: IntArray  # [sum(num_tokens)] ragged
    finished: Sequence[FinishedRequest] = ()
    admitted: Sequence[AdmittedRequest] = ()
    logprobs: Logprobs | None = None  # its rows index this object's token_ids
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    pooled: Mapping[str, object] = field(default_factory=dict)  # request id -> pooled hidden state
    finished_kv_transfers: Sequence[str] = ()
    stats: SchedulerStats | None = None
    did_run: bool = True  # False: nothing could be scheduled, so the driver waits instead of stepping again at once
