"""EngineServer: drives an engine in a process of its own, for a front end at the other end of two sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.engine.driver import drive, waiting_phase
from tokenyard.engine.process_io import Arrived, Command, EngineIO, refuse, without_kv_events
from tokenyard.interfaces.engine_core import PauseMode
from tokenyard.ipc.failures import error_to_message
from tokenyard.ipc.messages import Answer, Call, FinishRequests
from tokenyard.ipc.outputs import stats_to_message
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from tokenyard.clock import Clock
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.engine_core import EngineCore
    from tokenyard.ipc.progress import Progress
    from tokenyard.request import EngineCoreRequest


class EngineServer:
    """Is the driver's Arrivals: what came is applied between two steps, in the order in which it was sent.

    A command that fails concerns its sender alone; a step that fails, and a thread of the sockets, end the engine.
    """

    def __init__(self, io: EngineIO, core: EngineCore, clock: Clock, progress: Progress) -> None:
        self._io, self._core, self._clock, self._progress = io, core, clock, progress
        self._num_unfinished = 0
        self._settling: list[int] = []  # calls that are answered once nothing is left in flight

    def serve(self) -> None:
        """Until the front end asks for the end; raises what ended the engine otherwise."""
        drive(self._core, self._clock, self._deliver, arrivals=self, until=lambda: self._io.is_stopping)

    # Arrivals

    @property
    def event(self) -> threading.Event:
        return self._io.event

    def due(self, now: float) -> Sequence[EngineCoreRequest]:
        self._io.event.clear()  # first: what comes from here on sets it again
        if self._io.failure is not None:
            raise self._io.failure
        commands = self._io.commands
        if commands:
            while commands:
                self._apply(commands.popleft())
        if self._settling:
            self._settle()
        self._progress.begin_step(self._num_unfinished)
        return ()

    def next_time(self) -> float | None:
        self._progress.enter(waiting_phase(self._core))  # asked for right before a wait
        return None

    def is_exhausted(self) -> bool:
        return False  # `until` ends the loop

    # Commands

    def _apply(self, command: Command) -> None:
        if isinstance(command, Arrived):
            self._add(command)
        elif isinstance(command, FinishRequests):
            self._finish(command.request_ids, command.reason)
        elif command.name == "settle":
            self._settling.append(command.call_id)
        else:
            self._answer(command)

    def _add(self, arrived: Arrived) -> None:
        added: list[str] = []
        try:
            for request in arrived.requests:
                self._core.add_request(request)
                added.append(request.request_id)
        except Exception as error:  # also of a policy: it concerns these requests alone
            self._core.finish_requests(added, FinishReason.ABORT)
            refuse(self._io.send, [request.request_id for request in arrived.requests], arrived.call_id, error)
            return
        self._num_unfinished += len(added)
        if arrived.call_id is not None:
            self._io.send(Answer(arrived.call_id))

    def _finish(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        ended = self._core.finish_requests(request_ids, reason)
        self._num_unfinished -= len(ended)
        return ended

    def _answer(self, call: Call) -> None:
        try:
            answer = self._answered(call)
        except Exception as error:
            answer = Answer(call.call_id, error=error_to_message(error))
        self._io.send(answer)

    def _answered(self, call: Call) -> Answer:
        if call.name == "stats":
            return Answer(call.call_id, stats=stats_to_message(self._core.stats()))
        if call.name == "reset_prefix_cache":
            return Answer(call.call_id, value=self._core.reset_prefix_cache())
        if call.name == "pause":
            ended = list(self._core.pause(PauseMode(call.mode)))
            self._num_unfinished -= len(ended)
            return Answer(call.call_id, request_ids=ended)
        if call.name == "resume":
            self._core.resume()
        if call.name == "health":
            self._core.check_health()
        return Answer(call.call_id, num_dropped_frames=self._io.num_dropped_frames)

    def _settle(self) -> None:
        if not self._core.has_requests():
            for call_id in self._settling:
                self._io.send(Answer(call_id))
            self._settling.clear()

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        self._num_unfinished -= len(outputs.finished)
        if outputs.did_run:
            self._progress.end_step(self._num_unfinished)
        if outputs.did_run or outputs.finished or outputs.events:
            self._io.send(without_kv_events(outputs))
