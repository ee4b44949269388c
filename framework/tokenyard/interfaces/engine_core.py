"""EngineCore: the loop schedule -> execute -> update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.clock import Clock
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces.executor import Executor
    from tokenyard.interfaces.observer import Observer
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.request import EngineCoreRequest, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreContext:
    """What an engine loop's factory is given: its collaborators, ready to run."""

    scheduler: Scheduler
    executor: Executor
    clock: Clock
    observers: Sequence[Observer] = ()


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
    def pause(self) -> None:
        """Run no further step until `resume`; requests may still be added and ended."""

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
