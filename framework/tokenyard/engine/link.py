"""EngineLink: how an asynchronous front end reaches an engine that steps by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenyard.clock import Clock
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.ipc.progress import ProgressReading
    from tokenyard.request import EngineCoreRequest, FinishReason


class EngineListener(Protocol):
    """Who is told what an engine does; called in one thread of the link's, never in two at a time."""

    def deliver(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        """One step's results; returns the engine ids of requests that a stop string has ended, for the engine."""

    def refuse(self, request_ids: Sequence[str], error: Exception) -> None:
        """What one `add` brought was not queued, none of it, and why."""

    def end(self, failure: BaseException | None) -> None:
        """The engine has ended: None = it was stopped. Nothing is called after this."""


class EngineLink(ABC):
    """An engine in a thread of this process or in a process of its own. Its methods may be called from any thread.

    Requests and commands take effect between two steps, in the order in which they were given. After the engine's end
    every method but `stop` raises EngineDeadError. Times are this process's `clock`: a link to another process
    converts them.
    """

    clock: Clock

    @abstractmethod
    def begin(self, listener: EngineListener) -> None:
        """Start to take requests; called once."""

    @abstractmethod
    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests, all or none. Returns at once; a refusal comes to `EngineListener.refuse`."""

    @abstractmethod
    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """End requests; unknown ones and those that have ended are ignored. Returns at once."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests hold blocks. Waits for the engine."""

    @abstractmethod
    def stats(self) -> SchedulerStats:
        """Counters and gauges, now. Waits for the engine."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine after the step that runs, and wait for that; a second call does nothing more."""

    # For those who watch over it: also while it answers nobody

    @abstractmethod
    def progress(self) -> ProgressReading:
        """How far the engine is; asks nobody."""

    def num_dropped_frames(self) -> int:
        """What has come from the engine and was no message; asks nobody."""
        return 0

    @abstractmethod
    def dump_stacks(self, path: Path | None = None) -> str:
        """The Python stacks of all threads of this process and the engine's, for people; takes up to some seconds.

        They are written to a new file at `path`, too, which an EngineDeadError names later.
        """

    @abstractmethod
    def kill(self, cause: str) -> None:
        """End an engine that hangs, without waiting for it; the listener is told of its end as of any other."""
