"""EngineCore: the loop schedule -> execute -> update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.clock import Clock
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces.executor import Executor
    from tokenyard.interfaces.observer import Observer
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.plugin_times import PluginTimes
    from tokenyard.request import EngineCoreRequest, FinishReason


class PauseMode(str, Enum):
    """What a pause does with the requests that are there (since API 1.2)."""

    KEEP = "keep"  # nothing runs any more; everything goes on at `resume`
    WAIT = "wait"  # requests that have started run to their end; those that have not, and new ones, wait
    ABORT = "abort"  # requests that are there end with `abort`; new ones wait

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreContext:
    """What an engine loop's factory is given: its collaborators, ready to run."""

    scheduler: Scheduler
    executor: Executor
    clock: Clock
    observers: Sequence[Observer] = ()
    log_stats: bool = True  # whether outputs without a step carry stats too (since API 1.5)
    plugin_times: PluginTimes | None = None  # told how long each step took; None = nobody asks (since API 1.6)


class EngineCore(ABC):
    """Driven by `tokenyard.engine.driver.drive` or a front end's client, from one thread.

    A request's tokens are identical under every loop; schedules may differ. The core owns token accounting, K/V
    blocks, steps in flight and aborts; a policy can neither choose nor break the loop.
    """

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises, leaving no trace, when it can never run or its id is in use."""

    @abstractmethod
    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        """End requests from outside: abort, stop string, deadline. Returns the ids that were alive."""

    @abstractmethod
    def step(self) -> EngineCoreOutputs:
        """Run one turn of the loop. `did_run=False` says that nothing could run."""

    @abstractmethod
    def has_requests(self) -> bool:
        """Whether any request has not ended, steps in flight included."""

    @abstractmethod
    def wake_at(self) -> float | None:
        """When to step again although nothing happened; None = when something arrives."""

    @abstractmethod
    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Sequence[str]:
        """Start no further request until `resume`; requests may still be added and ended.

        Returns the ids that it ended: those of every request that was there under `ABORT`, else none. Steps in flight
        are still taken in by `step`. A second pause replaces the first one's mode.
        """

    @abstractmethod
    def resume(self) -> None:
        """Undo `pause`."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False, with nothing changed, while requests hold blocks."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Counters and gauges, now."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the executor; a second call does nothing."""

    # Since API 1.2; a loop for an older one has the default

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds requests back."""
        return False

    # Since API 1.5; a loop for an older one has the default

    def check_health(self) -> None:
        """Raise EngineDeadError when no step could run any more. Asked about once a second while nothing runs."""
        return
