"""Witness: tells the parts of a record of each step, and that none of them has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.interfaces.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.scheduler_output import SchedulerOutput


class Witness(Observer):
    """An engine goes on without an observer that fails; a record that lacks steps would be wrong, so a run does not."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self._failure: Exception | None = None

    def open(self, observers: Sequence[Observer]) -> None:
        """Tell these from now on."""
        self._observers = observers

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        try:
            for observer in self._observers:
                observer.on_step(output, result, now)
        except Exception as error:
            self._failure = error
            raise

    def check(self) -> None:
        """Raise what an observer has raised."""
        if self._failure is not None:
            raise self._failure
