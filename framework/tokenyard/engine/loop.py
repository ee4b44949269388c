"""EngineLoop: what the engine loops share, which is all of EngineCore but `step`."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
from tokenyard.errors import EngineDeadError, ValidationError
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext, PauseMode
from tokenyard.interfaces.executor import Executor
from tokenyard.interfaces.kv_cache import KVCacheManager
from tokenyard.interfaces.scheduler import Scheduler
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from tokenyard.interfaces.executor import StepFuture
    from tokenyard.interfaces.observer import Observer
    from tokenyard.request import EngineCoreRequest
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

_NOTHING = np.empty(0, dtype=np.int32)
NOTHING_RAN = EngineCoreOutputs(request_ids=(), num_tokens=_NOTHING, token_ids=_NOTHING, did_run=False)


class EngineLoop(EngineCore):
    """A loop adds `step`, made of `_schedule`, `_execute`, `_update` and `_observe`, inside `_fatal_errors`.

    An exception inside a step ends the engine: the state of its K/V cache is unknown from then on.
    """

    def __init__(self, context: EngineCoreContext) -> None:
        self._scheduler = context.scheduler
        self._executor = context.executor
        self._clock = context.clock
        self._observers: list[Observer] = list(context.observers)
        self._log_stats = context.log_stats
        self._plugin_times = context.plugin_times
        self._began = 0.0  # perf_counter at the beginning of the step
        self._deadlines: dict[str, float | None] = {}  # of every request whose end was not reported yet
        self._pause_mode: PauseMode | None = None
        self._asked_at = -math.inf  # engine-clock time at which a step was last asked for
        self._failure: BaseException | None = None
        self._is_shut_down = False

    # Requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        self._scheduler.add_request(request)
        self._deadlines[request.request_id] = request.deadline

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        self._check_alive()
        if isinstance(request_ids, str):
            raise TypeError(f"finish_requests takes a list of request ids; got the string {request_ids!r}")
        try:
            ended = self._scheduler.finish_requests(request_ids, reason)
        except Exception:
            self._forget(request_ids)  # a policy failed when it was told of their end
            raise
        self._forget(ended)
        return ended

    def has_requests(self) -> bool:
        return self._failure is None and self._scheduler.has_requests()

    def wake_at(self) -> float | None:
        """The earliest deadline, or moment that the scheduler named, for which no step has been asked yet.

        One that has passed unused says nothing about the next; while halted only deadlines count.
        """
        moments = [deadline for deadline in self._deadlines.values() if deadline is not None]
        if not self._is_halted and (moment := self._scheduler.wake_at()) is not None:
            moments.append(moment)
        return min((moment for moment in moments if moment > self._asked_at), default=None)

    # Pauses

    @property
    def is_paused(self) -> bool:
        return self._pause_mode is not None

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Sequence[str]:
        self._check_alive()
        self._set_pause(_pause_mode(mode))
        if self._pause_mode is PauseMode.ABORT:
            return self.finish_requests(tuple(self._deadlines), FinishReason.ABORT)
        return ()

    def resume(self) -> None:
        self._set_pause(None)

    # The rest

    def reset_prefix_cache(self) -> bool:
        self._check_alive()
        return self._scheduler.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def check_health(self) -> None:
        with self._fatal_errors():
            self._executor.check_health()

    def shutdown(self) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            for observer in self._observers:
                try:
                    observer.on_shutdown()
                except (Exception, SystemExit):
                    logger.warning("observer %s failed at shutdown", type(observer).__name__, exc_info=True)
            self._tell_shadow()
        finally:
            self._executor.shutdown()

    def _tell_shadow(self) -> None:
        if self._failure is None and (shadow := self._scheduler.stats().shadow) is not None:
            logger.info("%s", shadow)

    # What a step is made of

    def _fatal_errors(self) -> _FatalErrors:
        """Around a step: refuses to start one in an engine that has ended, and ends it when the step raises."""
        self._check_alive()
        self._began = perf_counter()
        return _FatalErrors(self._fail)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        if isinstance(error, Exception):
            raise self._death() from error

    def _schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run or may."""
        self._asked_at = self._clock.now()
        return None if self._is_halted else self._scheduler.schedule()

    def _execute(self, output: SchedulerOutput) -> StepFuture[ModelRunnerOutput]:
        self._executor.execute_model(output)
        return self._executor.sample_tokens()

    def _update(self, output: SchedulerOutput, future: StepFuture[ModelRunnerOutput]) -> EngineCoreOutputs:
        """Wait for a step and take it in."""
        if future.ready_at is not None:
            self._clock.wait(until=future.ready_at)
        outputs = self._scheduler.update_from_output(output, future.result())
        self._forget(end.request_id for end in outputs.finished)
        return outputs

    def _without_step(self) -> EngineCoreOutputs:
        """What there is to tell when no step is there to be updated."""
        finished = tuple(self._scheduler.take_finished())
        self._forget(end.request_id for end in finished)
        if not finished and not self._log_stats:
            return NOTHING_RAN
        return replace(
            NOTHING_RAN,
            finished=finished,
            events=self._scheduler.take_events(),
            stats=self._scheduler.stats() if self._log_stats else None,
            did_run=bool(finished),
        )

    def _observe(self, output: SchedulerOutput, outputs: EngineCoreOutputs) -> None:
        """The end of a step."""
        for observer in tuple(self._observers):
            try:
                observer.on_step(output, outputs, self._clock.now())
            except (Exception, SystemExit):
                logger.warning("observer %s failed and is switched off", type(observer).__name__, exc_info=True)
                self._observers.remove(observer)
        if self._plugin_times is not None:
            self._plugin_times.count_step(perf_counter() - self._began)

    # Helpers

    @property
    def _is_halted(self) -> bool:
        """Whether not even what has started may run."""
        return self._pause_mode is not None and self._pause_mode is not PauseMode.WAIT

    def _set_pause(self, mode: PauseMode | None) -> None:
        if (mode is PauseMode.WAIT) != (self._pause_mode is PauseMode.WAIT):
            self._scheduler.pause_admission(mode is PauseMode.WAIT)  # raises when the scheduler cannot
        self._pause_mode = mode

    def _forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._deadlines.pop(request_id, None)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._death() from self._failure
        if self._is_shut_down:
            raise EngineDeadError("the engine is shut down; start a new one")

    def _death(self) -> EngineDeadError:
        cause = f"{type(self._failure).__name__}: {self._failure}"
        where = _where(self._failure)
        return EngineDeadError(f"the engine stopped on an error{where and f' in {where}'} ({cause}); start a new one")


class _FatalErrors:
    """Tells `fail` what is raised inside; a generator as context manager costs three times as much, every step."""

    __slots__ = ("_fail",)

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)


def _where(error: BaseException | None) -> str:
    """The method of a part that an error came out of, the innermost one: it may be a plugin's."""
    found, traceback = "", None if error is None else error.__traceback__
    while traceback is not None:
        owner, method = traceback.tb_frame.f_locals.get("self"), traceback.tb_frame.f_code.co_name
        if isinstance(owner, Scheduler | KVCacheManager | Executor) and not method.startswith("_"):
            found = f"{type(owner).__name__}.{method}"
        traceback = traceback.tb_next
    return found


def _pause_mode(given: PauseMode | str) -> PauseMode:
    try:
        return PauseMode(given)
    except ValueError:
        allowed = ", ".join(f"'{mode.value}'" for mode in PauseMode)
        raise ValidationError(f"pause mode {given!r} is not one of {allowed}", parameter="mode", value=given) from None
