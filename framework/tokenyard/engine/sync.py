"""SyncEngineCore: schedule, execute, update - one after the other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.observer import Observer
    from tokenyard.request import EngineCoreRequest, FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

_NOTHING = np.empty(0, dtype=np.int32)
NOTHING_RAN = EngineCoreOutputs(request_ids=(), num_tokens=_NOTHING, token_ids=_NOTHING, did_run=False)


class SyncEngineCore(EngineCore):
    """An exception inside a step ends the engine: the state of its K/V cache is unknown from then on."""

    def __init__(self, context: EngineCoreContext) -> None:
        self._scheduler = context.scheduler
        self._executor = context.executor
        self._clock = context.clock
        self._observers: list[Observer] = list(context.observers)
        self._is_paused = False
        self._failure: BaseException | None = None
        self._is_shut_down = False

    def step(self) -> EngineCoreOutputs:
        self._check_alive()
        if self._is_paused:
            return NOTHING_RAN
        try:
            output = self._scheduler.schedule()
            if output is None:
                return NOTHING_RAN
            result = self._execute(output)
            outputs = self._scheduler.update_from_output(output, result)
        except BaseException as error:
            self._failure = error
            if isinstance(error, Exception):
                raise self._death() from error
            raise
        self._observe(output, outputs)
        return outputs

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        self._scheduler.add_request(request)

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        self._check_alive()
        return self._scheduler.finish_requests(request_ids, reason)

    def has_requests(self) -> bool:
        return self._failure is None and self._scheduler.has_requests()

    def wake_at(self) -> float | None:
        return self._scheduler.wake_at()

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def reset_prefix_cache(self) -> bool:
        self._check_alive()
        return self._scheduler.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        for observer in self._observers:
            try:
                observer.on_shutdown()
            except Exception:
                logger.warning("observer %s failed at shutdown", type(observer).__name__, exc_info=True)
        self._executor.shutdown()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._executor.execute_model(output)
        future = self._executor.sample_tokens()
        if future.ready_at is not None:
            self._clock.wait(until=future.ready_at)
        return future.result()

    def _observe(self, output: SchedulerOutput, outputs: EngineCoreOutputs) -> None:
        for observer in tuple(self._observers):
            try:
                observer.on_step(output, outputs, self._clock.now())
            except Exception:
                logger.warning("observer %s failed and is switched off", type(observer).__name__, exc_info=True)
                self._observers.remove(observer)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._death() from self._failure
        if self._is_shut_down:
            raise EngineDeadError("the engine is shut down; start a new one")

    def _death(self) -> EngineDeadError:
        cause = f"{type(self._failure).__name__}: {self._failure}"
        return EngineDeadError(f"the engine stopped on an error ({cause}); start a new one")
