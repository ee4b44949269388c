"""The driver: advances an engine through time. The same function serves live runs and simulation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from tokenyard.errors import EngineDeadError, UserError
from tokenyard.ipc.progress import EnginePhase

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.engine_core import EngineCore
    from tokenyard.request import EngineCoreRequest


_HEALTH_INTERVAL = 0.5  # seconds between two looks at workers that have nothing to do


class Arrivals(Protocol):
    """Where requests come from."""

    def due(self, now: float) -> Sequence[EngineCoreRequest]:
        """Requests that have arrived by `now` and were not returned before."""

    def next_time(self) -> float | None:
        """When the next one arrives, if that is known."""

    def is_exhausted(self) -> bool:
        """Whether no more will come."""

    @property
    def event(self) -> threading.Event | None:
        """Set when something arrives at a time that nobody knew; None where all times are known."""


class NoArrivals:
    """Everything was added already."""

    event: threading.Event | None = None

    def due(self, now: float) -> Sequence[EngineCoreRequest]:
        return ()

    def next_time(self) -> float | None:
        return None

    def is_exhausted(self) -> bool:
        return True


def drive(
    engine: EngineCore,
    clock: Clock,
    deliver: Callable[[EngineCoreOutputs], None],
    arrivals: Arrivals | None = None,
    until: Callable[[], bool] | None = None,
) -> None:
    """Run until every request has ended and no more will arrive, or until `until`, asked before each step, is true.

    Time passes in the executor, or, when nothing can run, until the earliest of the next arrival and the engine's
    `wake_at`; a live engine that waits is looked after: see `EngineCore.check_health`. An engine that has requests,
    cannot run them and waits for nothing is stuck: EngineDeadError. One that does so because it is paused is alive, and
    whoever drives it has to resume it: UserError.
    """
    source = arrivals or NoArrivals()
    has_insisted = False
    while until is None or not until():
        for request in source.due(clock.now()):
            engine.add_request(request)
        if engine.has_requests():
            outputs = engine.step()
            deliver(outputs)
            if outputs.did_run or not engine.has_requests():
                has_insisted = False
                continue
        elif source.is_exhausted():
            return
        moments = [moment for moment in (engine.wake_at(), source.next_time()) if moment is not None]
        if not moments and (source.event is None or source.is_exhausted()):
            if not has_insisted and not engine.is_paused:
                has_insisted = True  # the time for which it waited may have come between its step and this question
                continue
            raise _stuck(engine)
        if source.event is not None:  # live: nothing else would notice that a worker has died
            engine.check_health()
            moments.append(clock.now() + _HEALTH_INTERVAL)
        clock.wait(min(moments, default=None), source.event)


def waiting_phase(engine: EngineCore) -> EnginePhase:
    """That of a live engine that has nothing to do, or whose last step did not run."""
    if not engine.has_requests():
        return EnginePhase.IDLE
    stats = engine.stats()
    is_deferred = not stats.num_running and 0 < stats.num_skipped == stats.num_waiting
    return EnginePhase.HELD if engine.is_paused or is_deferred else EnginePhase.IDLE


def _stuck(engine: EngineCore) -> EngineDeadError | UserError:
    if engine.is_paused:
        return UserError("the engine is paused and its requests wait for nothing else; resume() it, or end them")
    return EngineDeadError(f"the engine has requests but can neither run nor wait: {engine.stats()}")
