"""EngineCoreOutputs: what one engine step tells the front end; columnar, made without touching requests one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.kv_events import KVEvent
    from tokenyard.request import FinishReason
    from tokenyard.runner_output import Logprobs, PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """How one request ended."""

    request_id: str
    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token id, None for EOS; "deadline" for an abort by deadline
    error: str | None = None  # for FinishReason.ERROR: what went wrong, for the user
    client_id: str | None = None  # whose request it was


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request that entered the running batch in this step."""

    request_id: str
    num_cached_tokens: int  # prompt tokens whose prefill the prefix cache saved
    scheduled_at: float  # engine-clock seconds: when its first step began
    client_id: str | None = None


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
    num_skipped: int = 0  # of the waiting: set aside in the last step because the policy deferred them
    preempted_prefix_cache_queries: int = 0  # known tokens of requests resumed after a preemption
    preempted_prefix_cache_hits: int = 0  # those of them that the prefix cache had kept
    wait_reason: str | None = None  # a WaitReason: why the first request in line waits

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
    stats: SchedulerStats | None = None  # None with engine.log_stats=false
    kv_events: Sequence[KVEvent] = ()  # only when an observer wants them
    did_run: bool = True  # False: nothing could be scheduled, so the driver waits instead of stepping again at once
