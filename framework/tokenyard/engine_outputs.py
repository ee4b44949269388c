"""EngineCoreOutputs: what one engine step tells the front end; columnar, made without touching requests one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

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
    num_preemptions: int = 0  # how often it had lost its turn or its blocks (since API 1.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A request that entered the running batch in this step."""

    request_id: str
    num_cached_tokens: int  # prompt tokens whose prefill the prefix cache saved
    scheduled_at: float  # engine-clock seconds: when its first step began
    client_id: str | None = None


class RequestEventKind(str, Enum):
    """What may happen to a request between its arrival and its end, but for the tokens that it gets."""

    CHUNK = "chunk"  # tokens of its prompt, or known ones after a preemption, were computed in a step
    PREEMPTED = "preempted"  # it waits again, with the tokens that it has
    RESUMED = "resumed"  # it entered the batch again
    DEFERRED = "deferred"  # the policy holds it back
    RELEASED = "released"  # the policy does so no longer, yet it does not fit

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """One of these (since API 1.5). Steps that only decode make none."""

    request_id: str
    kind: RequestEventKind
    at: float  # engine-clock seconds
    num_tokens: int = 0  # chunk: computed; preempted: computed before, and lost; resumed: of those, still in the cache
    reason: str | None = None  # preempted: why, a WaitReason or a word of the scheduler's; deferred: the policy's words
    mode: str | None = None  # preempted: a PreemptMode, what became of its K/V (since API 1.6)


class PluginTime(NamedTuple):
    """What one method of one plugin took since the start (since API 1.6)."""

    kind: str  # policy, shadow, observer, kv_cache, ...
    plugin: str  # the name under which it is chosen
    point: str  # the method
    seconds: float  # what it spent in other timed plugins taken out
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginStats:
    """What plugins cost, by the engine's own timers (since API 1.6). They count since the start, and lag a few steps.

    The K/V manager, its eviction rule, the predictor and the latency model are timed only with `plugins.budget_us`.
    """

    times: tuple[PluginTime, ...] = ()
    step_seconds: float = 0.0  # of steps, from beginning to end by the wall, models and plugins included
    num_over_budget: int = 0  # windows of 100 steps in which plugins took more than `plugins.budget_us`


class ShadowPoint(NamedTuple):
    """How often a shadow policy was compared with the acting one at a decision point (since API 1.6)."""

    point: str  # a method of SchedulingPolicy; `waiting_order`: who enters next
    num_agreed: int
    num_otherwise: int


class ShadowDecision(NamedTuple):
    """A decision that a shadow policy would have made otherwise (since API 1.6)."""

    point: str
    request_id: str | None  # about which one, if about one
    actual: str  # in words
    shadow: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowStats:
    """What came of `scheduler.shadow` so far (since API 1.6)."""

    policy: str
    points: tuple[ShadowPoint, ...] = ()
    is_on: bool = True  # False: it has failed, and is asked no more

    def __str__(self) -> str:
        counts = [
            f"{one.point} {one.num_otherwise} of {one.num_agreed + one.num_otherwise} times" for one in self.points
        ]
        failed = "" if self.is_on else "; it failed, and was switched off"
        return f"shadow policy '{self.policy}' would have decided otherwise: {', '.join(counts) or 'never'}{failed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start, and gauges of now.

    `num_waiting_by_reason`: those that the policy defers and those that a pause holds back count by themselves, all
    others by what the first among them waits for. `num_rejected_by_reason`: requests that were queued and then ended
    because they would never run: `policy` refused them, or deferred them for good (`deferred`), or they did not fit
    although nothing else ran (`capacity`).
    """

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
    num_waiting_by_reason: Mapping[str, int] = field(default_factory=dict)  # by WaitReason (since API 1.5)
    num_rejected_by_reason: Mapping[str, int] = field(default_factory=dict)  # a counter (since API 1.5)
    plugins: PluginStats | None = field(default=None, compare=False)  # no two runs take the same time (since API 1.6)
    num_paused: int = 0  # of the running: they have lost their turn, and hold no place of max_num_seqs (since API 1.6)
    shadow: ShadowStats | None = None  # with `scheduler.shadow` (since API 1.6)

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
    events: Sequence[RequestEvent] = ()  # none with engine.log_stats=false (since API 1.5)
    num_scheduled_tokens: int = 0  # of the step, prefill and decode together (since API 1.5)
    kv_events: Sequence[KVEvent] = ()  # only when an observer wants them
    did_run: bool = True  # False: nothing could be scheduled, so the driver waits instead of stepping again at once
