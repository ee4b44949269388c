"""EngineThread: a link to an engine that steps in a thread of this process."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from tokenyard.engine.driver import drive, waiting_phase
from tokenyard.engine.link import EngineLink, EngineListener
from tokenyard.errors import EngineDeadError
from tokenyard.ipc.progress import EnginePhase, Progress
from tokenyard.ipc.stacks import own_stacks, save_stacks
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    from tokenyard.clock import Clock
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces.engine_core import EngineCore
    from tokenyard.ipc.progress import ProgressReading
    from tokenyard.request import EngineCoreRequest


class Engine(Protocol):
    """What the thread needs of a built engine."""

    @property
    def core(self) -> EngineCore: ...
    @property
    def clock(self) -> Clock: ...


T = TypeVar("T")
EngineT_co = TypeVar("EngineT_co", bound=Engine, covariant=True)

Command: TypeAlias = "Callable[[EngineCore], None]"

_SHUT_DOWN = "the engine is shut down; start a new one"


class EngineThread(EngineLink, Generic[EngineT_co]):
    """Everything the engine does, loading included, happens in one thread: torch keeps its settings by thread.

    The listener is called in that thread. Commands run between two steps, in order; one that raises ends the engine, so
    each handles its own errors. A stop string ends its request before the next step.
    """

    def __init__(self, build: Callable[[], EngineT_co]) -> None:
        """Start the thread and wait until the engine is built; raises what `build` raised."""
        self._commands: collections.deque[Command] = collections.deque()
        self._is_stopping = False
        self._has_ended = False
        self._is_killed = False
        self._lock = threading.Lock()  # between posting a command and the end, after which none runs
        self._telling = threading.Lock()  # around calls of the listener: `kill` comes from another thread
        self._dump_path: Path | None = None
        self._begin = threading.Event()
        self._progress = Progress()
        self._num_unfinished = 0
        self._built: Future[EngineT_co] = Future()
        self._listener: EngineListener | None = None
        self.event: threading.Event = threading.Event()  # as Arrivals has it: something was posted
        self._thread = threading.Thread(target=self._run, args=(build,), name="tokenyard-engine", daemon=True)
        self._thread.start()
        self.engine = self._built.result()
        self.clock = self.engine.clock

    def begin(self, listener: EngineListener) -> None:
        self._listener = listener
        self._begin.set()

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.post(lambda core: self._add(core, requests))

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        def finish(core: EngineCore) -> None:
            self._num_unfinished -= len(core.finish_requests(request_ids, reason))

        self.post(finish)

    def reset_prefix_cache(self) -> bool:
        return self.call(lambda core: core.reset_prefix_cache())

    def stats(self) -> SchedulerStats:
        return self.call(lambda core: core.stats())

    def post(self, command: Command) -> None:
        """Run a command between two steps; EngineDeadError after the end."""
        with self._lock:
            if self._has_ended or self._is_stopping:
                raise EngineDeadError(_SHUT_DOWN)
            self._commands.append(command)
        self.event.set()

    def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run a function between two steps and return what it returns, or raise what it raises."""
        future: Future[T] = Future()

        def command(core: EngineCore) -> None:
            try:
                future.set_result(function(core))
            except Exception as error:
                future.set_exception(error)

        self.post(command)
        while True:
            try:
                return future.result(timeout=0.1)
            except TimeoutError:
                if future.done():
                    raise
                if (self._is_killed or not self._thread.is_alive()) and not future.done():
                    raise EngineDeadError("the engine ended before it could answer; start a new one") from None

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
        self._begin.set()
        self.event.set()
        if threading.current_thread() is not self._thread and not self._is_killed:
            self._thread.join()

    def progress(self) -> ProgressReading:
        return self._progress.read()

    def dump_stacks(self, path: Path | None = None) -> str:
        text = own_stacks()
        if path is not None:
            save_stacks(text, path)
            self._dump_path = path
        return text

    def kill(self, cause: str) -> None:
        """Nothing can end a thread: it is left behind, and ends after its step, which may be never."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = self._is_stopping = self._is_killed = True
        with self._telling:
            if self._listener is not None:
                self._listener.end(EngineDeadError(cause, dump_path=self._dump_path))

    # Arrivals: commands add the requests themselves, so that one which is refused concerns nobody else

    def due(self, now: float) -> Sequence[EngineCoreRequest]:
        self.event.clear()  # first: what is posted from here on sets it again
        while self._commands:
            self._commands.popleft()(self.engine.core)
        self._progress.begin_step(self._num_unfinished)
        return ()

    def next_time(self) -> float | None:
        self._progress.enter(waiting_phase(self.engine.core))  # asked for right before a wait
        return None

    def is_exhausted(self) -> bool:
        return False  # `until` ends the loop

    def _run(self, build: Callable[[], EngineT_co]) -> None:
        try:
            self._built.set_result(build())
        except BaseException as error:
            self._progress.close()
            self._built.set_exception(error)
            return
        self._begin.wait()
        failure: BaseException | None = None
        try:
            drive(self.engine.core, self.clock, self._deliver, arrivals=self, until=lambda: self._is_stopping)
        except BaseException as error:
            failure = error
        self._end(failure)

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            self._has_ended = True
        self._progress.enter(EnginePhase.ENDED)
        try:
            self.engine.core.shutdown()
        finally:
            if self._listener is not None and not self._is_killed:
                self._listener.end(failure)
            self._progress.close()

    def _add(self, core: EngineCore, requests: Sequence[EngineCoreRequest]) -> None:
        added: list[str] = []
        try:
            for request in requests:
                core.add_request(request)
                added.append(request.request_id)
            self._num_unfinished += len(added)
        except Exception as error:  # also of a policy: it concerns these requests alone
            core.finish_requests(added, FinishReason.ABORT)
            with self._telling:
                if self._listener is not None and not self._is_killed:
                    self._listener.refuse([request.request_id for request in requests], error)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        self._num_unfinished -= len(outputs.finished)
        if outputs.did_run:
            self._progress.end_step(self._num_unfinished)
        with self._telling:
            if self._listener is None or self._is_killed:
                return
            stopped = self._listener.deliver(outputs)
        if stopped:
            self._num_unfinished -= len(self.engine.core.finish_requests(stopped, FinishReason.STOP))
            self._progress.set_unfinished(self._num_unfinished)
