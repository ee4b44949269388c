"""Scheduler: which tokens of which requests run in the next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from tokenyard.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard.clock import Clock
    from tokenyard.config import SchedulerConfig
    from tokenyard.engine_outputs import (
        EngineCoreOutputs,
        FinishedRequest,
        RequestEvent,
        SchedulerStats,
        ShadowDecision,
    )
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.interfaces.latency import LatencyModel
    from tokenyard.interfaces.policy import RequestView, SchedulingPolicy
    from tokenyard.interfaces.predictor import OutputLengthPredictor
    from tokenyard.plugin_times import PluginTimes
    from tokenyard.request import EngineCoreRequest, FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext:
    """What a scheduler's factory is given, in the engine process."""

    config: SchedulerConfig
    kv_cache_manager: KVCacheManager
    policy: SchedulingPolicy | None
    clock: Clock
    max_model_len: int
    vocab_size: int
    block_size: int
    prefix_caching: bool  # whether look-ups of prompts count as prefix-cache queries
    seed: int
    log_stats: bool = True  # whether outputs carry stats (since API 1.2)
    latency: LatencyModel | None = None  # for policies (since API 1.6)
    # Makes the output-length predictor for policies; it is given what the scheduler knows of true lengths (API 1.6)
    make_predictor: Callable[[Callable[[RequestView], int]], OutputLengthPredictor] | None = None
    shadow: SchedulingPolicy | None = None  # asked beside the policy, and never obeyed (since API 1.6)
    plugin_times: PluginTimes | None = None  # counts what a policy takes; None = nobody asks (since API 1.6)


class RequestStatus(str, Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # never started
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again, with the tokens that it has
    FINISHED = "finished"

    def __str__(self) -> str:
        return self.value


class WaitReason(str, Enum):
    """Why a waiting request did not start in the step that was scheduled last."""

    NEW = "new"  # no step was scheduled since it arrived
    PAUSED = "paused"  # the engine admits nothing
    MAX_NUM_SEQS = "max_num_seqs"  # as many requests run as may
    TOKEN_BUDGET = "token_budget"  # noqa: S105 - the step's tokens were used up
    KV_BLOCKS = "kv_blocks"  # too few free blocks
    BLOCKS_IN_FLIGHT = "blocks_in_flight"  # enough blocks, once the steps in flight have landed
    PREEMPTION = "preemption"  # the step took blocks away from a running request, so it gave none to a new one
    DEFERRED = "deferred"  # the policy said so
    BEHIND = "behind"  # another request is before it in the line, and nobody overtakes

    def __str__(self) -> str:
        return self.value


class RequestSnapshot(NamedTuple):
    """A live request, for reports and tests. Token counts are of delivered tokens."""

    request_id: str
    status: RequestStatus
    num_prompt_tokens: int
    num_computed_tokens: int  # tokens whose K/V is there, steps in flight not counted
    num_in_flight_tokens: int
    num_output_tokens: int
    num_preemptions: int
    wait_reason: WaitReason | None  # None while it runs
    wait_detail: str | None = None  # numbers or the policy's words, for people
    is_paused: bool = False  # it runs, but has lost its turn (since API 1.6)


class SchedulerSnapshot(NamedTuple):
    """Every live request, in order."""

    running: tuple[RequestSnapshot, ...]  # in admission order
    waiting: tuple[RequestSnapshot, ...]  # the first to be admitted comes first


class Scheduler(ABC):
    """Called by the engine loop only, in the engine process, from one thread.

    `decision_points` names the methods of a SchedulingPolicy that this scheduler asks; it is empty for a scheduler that
    takes no policy.

    For every `schedule` whose output was given to an executor there is exactly one `update_from_output`, in order;
    a loop may have several such steps in flight. Every accepted request ends exactly once, in the outputs of an
    `update_from_output`, in `take_finished` or in the return of `finish_requests`, whatever happens between.
    """

    decision_points: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. One that can never run raises (CapacityError, ValidationError) and leaves no trace."""

    @abstractmethod
    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        """End requests at any moment: waiting, running, in flight. Unknown or ended ids are ignored.

        Returns the ids that this call ended. Tokens of theirs still in flight are dropped.
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run now. Never an empty step."""

    @abstractmethod
    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Take in what the executor made of `output`."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether any accepted request has not ended."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, with nothing changed, while requests hold blocks."""

    @abstractmethod
    def wake_at(self) -> float | None:
        """When `schedule` should be tried again although nothing happened; None = never."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Counters and gauges, now."""

    # Since API 1.2; a scheduler for an older one has the defaults

    def take_finished(self) -> Sequence[FinishedRequest]:
        """Ends requests that are past their deadline, and returns those that ended outside a step since the last call.

        A loop calls it whenever it has no step to update: while paused, and when `schedule` returned None. What
        ended outside a step otherwise comes with the next `update_from_output`.
        """
        return ()

    def pause_admission(self, is_paused: bool) -> None:
        """Whether to start no request; those that run or were preempted go on."""
        raise UnsupportedError(
            f"{type(self).__name__} cannot pause admission; pause with mode 'keep' or 'abort'",
            parameter="mode",
            value="wait",
        )

    def snapshot(self, limit: int | None = None) -> SchedulerSnapshot:
        """The live requests, at most `limit` of the waiting ones; for reports and tests, not for the step loop."""
        raise UnsupportedError(
            f"{type(self).__name__} has no snapshot: it was written for plugin API 1.1 or older",
            parameter="snapshot",
            value=limit,
        )

    # Since API 1.5; a scheduler for an older one has the default

    def take_events(self) -> Sequence[RequestEvent]:
        """What happened to requests since the last call or `update_from_output`; none with log_stats=False.

        A loop calls it whenever it has no step to update, after `take_finished`.
        """
        return ()

    # Since API 1.6; a scheduler for an older one has the defaults

    def waiting_snapshot(self, limit: int) -> Sequence[RequestSnapshot]:
        """The first `limit` requests in line, as `snapshot` has them; where there is a cheaper way than that, by it."""
        return self.snapshot(limit).waiting[:limit]

    def take_shadow_decisions(self) -> Sequence[ShadowDecision]:
        """Where `SchedulerContext.shadow` would have decided otherwise since the last call, the last ones at least."""
        return ()
