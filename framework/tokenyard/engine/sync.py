"""SyncEngineCore: schedule, execute, update - one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.engine.loop import EngineLoop

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs


class SyncEngineCore(EngineLoop):
    """One step at a time."""

    def step(self) -> EngineCoreOutputs:
        with self._fatal_errors():
            output = self._schedule()
            if output is None:
                return self._without_step()
            future = self._execute(output)
            outputs = self._update(output, future)
        self._observe(output, outputs)
        return outputs
