"""EngineProcessLink: a link to an engine in a process of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tokenyard.clock import MonotonicClock
from tokenyard.engine.link import EngineLink, EngineListener
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces.engine_core import PauseMode
from tokenyard.ipc.failures import error_from_message
from tokenyard.ipc.messages import AddRequests, Answer, Call, Died, FinishRequests, Refused
from tokenyard.ipc.outputs import OutputsMessage, outputs_from_message, stats_from_message
from tokenyard.ipc.requests import request_to_message
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from pathlib import Path

    from tokenyard.engine.process import EngineProcess
    from tokenyard.engine_outputs import SchedulerStats
    from tokenyard.ipc.messages import FromEngine
    from tokenyard.ipc.progress import ProgressReading
    from tokenyard.request import EngineCoreRequest

_SHUT_DOWN = "the engine is shut down; start a new one"


class EngineProcessLink(EngineLink):
    """The listener is called in a thread that does nothing but receive. Takes over a process that is ready."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.clock = MonotonicClock()
        self._listener: EngineListener | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # around what follows
        self._calls: dict[int, Future[Answer]] = {}
        self._is_stopping = False
        self._killed_for: str | None = None
        self._death: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._receive, name="tokenyard-engine-link", daemon=True)

    def begin(self, listener: EngineListener) -> None:
        self._listener = listener
        self._thread.start()

    def add(self, requests: Sequence[EngineCoreRequest]) -> None:
        self._check_alive()
        now = self.clock.now()
        self.process.send(AddRequests([request_to_message(request, now) for request in requests]))

    def add_and_wait(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests, all or none; a refusal is raised here."""
        now = self.clock.now()
        messages = [request_to_message(request, now) for request in requests]
        self._ask(lambda number: AddRequests(messages, number))

    def finish(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        self._check_alive()
        self.process.send(FinishRequests(list(request_ids), reason))

    def reset_prefix_cache(self) -> bool:
        return bool(self._ask(lambda number: Call(number, "reset_prefix_cache")).value)

    def stats(self) -> SchedulerStats:
        answer = self._ask(lambda number: Call(number, "stats"))
        if answer.stats is None:
            raise EngineDeadError("the engine's process answers what was not asked")
        return stats_from_message(answer.stats)

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Sequence[str]:
        """See EngineCore.pause."""
        return self._ask(lambda number: Call(number, "pause", PauseMode(mode).value)).request_ids

    def resume(self) -> None:
        """See EngineCore.resume."""
        self._ask(lambda number: Call(number, "resume"))

    def check_health(self) -> int:
        """Raise EngineDeadError unless the step loop answers; returns how many frames it has dropped."""
        return self._ask(lambda number: Call(number, "health")).num_dropped_frames

    def settle(self) -> None:
        """Wait until no request is left, and no step in flight."""
        self._ask(lambda number: Call(number, "settle"))

    def progress(self) -> ProgressReading:
        return self.process.progress.read()

    def num_dropped_frames(self) -> int:
        return self.process.num_dropped_frames

    def dump_stacks(self, path: Path | None = None) -> str:
        return self.process.dump_stacks(path)

    def kill(self, cause: str) -> None:
        with self._lock:
            self._killed_for = self._killed_for or cause
        self.process.kill()

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
        self.process.stop()
        if self._thread.ident is None:
            self.process.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    # Calls

    def _ask(self, make: Callable[[int], AddRequests | Call]) -> Answer:
        number, future = next(self._numbers), Future[Answer]()
        with self._lock:
            self._raise_if_ended()
            self._calls[number] = future
        self.process.send(make(number))
        answer = future.result()
        if answer.error is not None:
            raise error_from_message(answer.error)
        return answer

    def _check_alive(self) -> None:
        with self._lock:
            self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if self._death is not None:
            raise self._death.copied()
        if self._is_stopping:
            raise EngineDeadError(_SHUT_DOWN)

    # In the thread that receives

    def _receive(self) -> None:
        failure: BaseException | None = None
        try:
            for message in self.process.receive():
                if isinstance(message, Died):
                    failure = error_from_message(message.error)
                    break
                self._take(message)
        except BaseException as error:  # of the listener, or a message that does not fit: nobody can go on from here
            failure = error
        self._end(failure)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, OutputsMessage):
            outputs = outputs_from_message(message, self.clock.now())
            if self._listener is not None and (stopped := self._listener.deliver(outputs)):
                self.process.send(FinishRequests(list(stopped), FinishReason.STOP))
        elif isinstance(message, Answer):
            with self._lock:
                future = self._calls.pop(message.call_id, None)
            if future is not None:
                future.set_result(message)
        elif isinstance(message, Refused) and self._listener is not None:
            self._listener.refuse(message.request_ids, error_from_message(message.error))

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            is_wanted = self._is_stopping and failure is None
            if self._killed_for is not None:
                failure = EngineDeadError(self._killed_for)
        self.process.note_end()
        death = None if is_wanted else self.process.death(failure)
        with self._lock:
            self._death = death or EngineDeadError(_SHUT_DOWN)
            calls, self._calls = list(self._calls.values()), {}
        for future in calls:
            future.set_exception(self._death.copied())
        try:
            if self._listener is not None:
                self._listener.end(death)
        finally:
            self.process.stop()
            self.process.close()
