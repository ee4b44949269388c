"""Observer: told what the engine did, a step at a time; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverContext:
    """What an observer's factory is given."""

    seed: int


class Observer:
    """Called by the engine loop after each step, in the engine process. An exception disables it, with a warning.

    `wants_kv_events` (since API 1.2): whether `EngineCoreOutputs.kv_events` is to be filled, which costs time.
    """

    wants_kv_events: ClassVar[bool] = False

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        """One step is done; `now` is engine-clock seconds."""

    def on_shutdown(self) -> None:
        """The engine stops."""
