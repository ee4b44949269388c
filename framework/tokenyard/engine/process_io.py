"""The threads around an engine in a process of its own: they decode what comes and encode what goes.

The step loop does no more than look into a deque and put objects into a queue.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.ipc.failures import error_to_message
from tokenyard.ipc.messages import (
    AddRequests,
    Answer,
    Call,
    FinishRequests,
    FromEngine,
    Launch,
    Refused,
    Stop,
    ToEngine,
    from_engine_codec,
    to_engine_codec,
)
from tokenyard.ipc.outputs import outputs_to_message
from tokenyard.ipc.requests import request_from_message

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.ipc.sockets import Channel
    from tokenyard.request import EngineCoreRequest

_LAST_WORDS = 2000  # milliseconds in which what was sent last has to be taken

RestoreMetadata: TypeAlias = "Callable[[EngineCoreRequest], EngineCoreRequest]"
"""Makes a request's metadata, plain data so far, what the active policy declares; raises ValidationError."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Requests of one message, ready for the engine."""

    requests: list[EngineCoreRequest]
    call_id: int | None


Command: TypeAlias = Arrived | FinishRequests | Call


class EngineIO:
    """Both sockets of an engine's process, with a thread each. `commands` and `event` are for the step loop."""

    def __init__(self, incoming: Channel, outgoing: Channel, clock: Clock) -> None:
        self._incoming, self._outgoing, self._clock = incoming, outgoing, clock
        self._to_engine, self._from_engine = to_engine_codec(), from_engine_codec()
        self._queue: queue.SimpleQueue[FromEngine | EngineCoreOutputs | None] = queue.SimpleQueue()
        self._restore: RestoreMetadata | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        self.commands: collections.deque[Command] = collections.deque()
        self.event = threading.Event()  # something was put there, or the end was asked for
        self.is_stopping = False
        self.failure: BaseException | None = None  # of one of the threads: the engine cannot go on
        self.launched: Future[Launch] = Future()
        self._reader = threading.Thread(target=self._guarded(self._read), name="tokenyard-input", daemon=True)
        self._writer = threading.Thread(target=self._guarded(self._write), name="tokenyard-output", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def num_dropped_frames(self) -> int:
        """Frames that came and were no message."""
        return self._to_engine.num_dropped

    def accept_requests(self, restore: RestoreMetadata) -> None:
        """From here on requests may come; before, they are refused."""
        self._restore = restore

    def send(self, message: FromEngine | EngineCoreOutputs) -> None:
        """Returns at once."""
        self._queue.put(message)

    def stop(self) -> None:
        """Ask the step loop to end; from any thread."""
        self.is_stopping = True
        self.event.set()

    def close(self) -> None:
        """Send what there is to send, and end both threads."""
        self._queue.put(None)
        self._writer.join()
        os.write(self._wake_writer, b"x")
        self._reader.join()
        self._incoming.close()

    # The threads

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.failure = error
                self.event.set()

        return run

    def _read(self) -> None:
        while not self._incoming.wait(None, [self._wake_reader]):
            while (frame := self._incoming.receive()) is not None:
                if (message := self._to_engine.decode(frame)) is not None:
                    self._take(message)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Stop):
            self.stop()
        elif isinstance(message, Launch):
            if not self.launched.done():  # a second one is nobody's of ours
                self.launched.set_result(message)
        elif isinstance(message, AddRequests):
            self._take_requests(message)
        else:
            self.commands.append(message)
            self.event.set()

    def _take_requests(self, message: AddRequests) -> None:
        now = self._clock.now()
        try:
            if self._restore is None:
                raise RuntimeError("the engine does not take requests yet")
            requests = [self._restore(request_from_message(request, now)) for request in message.requests]
        except Exception as error:  # whatever a front end sends concerns its own requests alone
            refuse(self.send, [request.request_id for request in message.requests], message.call_id, error)
            return
        self.commands.append(Arrived(requests, message.call_id))
        self.event.set()

    def _write(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                if isinstance(message, EngineCoreOutputs):
                    message = outputs_to_message(message, self._clock.now())
                self._outgoing.send(self._from_engine.encode(message))
        finally:
            self._outgoing.close(_LAST_WORDS)


def refuse(send: Callable[[FromEngine], None], request_ids: list[str], call_id: int | None, error: Exception) -> None:
    """Tell that requests were not queued, and why."""
    told = error_to_message(error)
    send(Refused(request_ids, told) if call_id is None else Answer(call_id, error=told))


def without_kv_events(outputs: EngineCoreOutputs) -> EngineCoreOutputs:
    """For a queue: observers have had them already."""
    return replace(outputs, kv_events=()) if outputs.kv_events else outputs
