"""Scheduler: which tokens of which requests run in the next step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.clock import Clock
    from tokenyard.config import SchedulerConfig
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.interfaces.policy import SchedulingPolicy
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


class Scheduler(ABC):
    """Called by the engine loop only, in the engine process, from one thread.

    `decision_points` names the methods of a SchedulingPolicy that this scheduler asks; it is empty for a scheduler that
    takes no policy.

    For every `schedule` whose output was given to an executor there is exactly one `update_from_output`, in order;
    a loop may have several such steps in flight. Every accepted request ends exactly once, in the outputs of an
    `update_from_output` or the return of `finish_requests`, whatever happens between.
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
