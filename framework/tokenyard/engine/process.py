"""EngineProcess: an engine's own process, as its parent sees it, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from tokenyard.errors import EngineDeadError, UserError
from tokenyard.ipc.failures import error_from_message
from tokenyard.ipc.handshake import check_identity
from tokenyard.ipc.messages import (
    Died,
    FromEngine,
    Hello,
    Ready,
    StartPhase,
    Stop,
    ToEngine,
    from_engine_codec,
    to_engine_codec,
)
from tokenyard.ipc.processes import ChildProcess, ProcessEnd
from tokenyard.ipc.progress import EnginePhase, Progress
from tokenyard.ipc.sockets import Channel, SocketFolder
from tokenyard.ipc.stacks import Stacks, own_stacks, save_stacks
from tokenyard.primitive_caches import bound_primitive_caches
from tokenyard.thread_waits import share_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "engine"
STOP_GRACE = 10.0  # seconds in which the step that runs ends, and the engine gives back what it has
_ALL_IS_WELL = re.compile(r"[\d\s:,.-]*(INFO|DEBUG)\b")  # with a time before it, or without
_DEATH_GRACE = 0.5  # seconds that a process takes to end when it has said that it does


class EngineProcess:
    """Started at once, told later what to be. `send` is for any thread, `receive` for one.

    However it ends, nothing of it is left: the process ends with this one, its sockets have no name once it runs, its
    memory and stacks are files without one.
    """

    def __init__(self, module: str) -> None:
        """`module` has the process's `main`: see `tokenyard.launch.engine_process`."""
        with _needs_space():
            self._folder = SocketFolder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._codec, self._to_engine = from_engine_codec(), to_engine_codec()
        self._dump_path: Path | None = None
        self._owner = os.getpid()
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.remove)
            undo.callback(self._context.destroy, 0)
            addresses = [self._folder.address(name) for name in ("commands", "results")]
            # Sending never waits for a process that has ended, or ends before it is there: see Channel.
            self._outgoing = Channel(self._context, addresses[0], binds=False)
            self._incoming = Channel(self._context, addresses[1], binds=True)
            with _needs_space():
                self.progress = Progress()
                undo.callback(self.progress.close)
                self.stacks = Stacks()
                undo.callback(self.stacks.close)
            environment = dict(os.environ)
            share_cores(environment)  # it has this process beside it
            bound_primitive_caches(environment)
            self._child = ChildProcess(
                module,
                NAME,
                environment=environment,
                arguments=[*addresses, str(self.progress.descriptor)],
                descriptors=[self.progress.descriptor],
                stacks=self.stacks.descriptor,
                folder=self._folder.path,
            )
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def end(self) -> ProcessEnd | None:
        """How it ended; None while it lives."""
        return self._child.end

    @property
    def num_dropped_frames(self) -> int:
        """Frames from there that were no message."""
        return self._codec.num_dropped

    def wait_until_ready(self, on_progress: Callable[[str], None] | None = None) -> Ready:
        """After its Launch was sent; raises what the start raised, or EngineDeadError when the process has gone."""
        phase = "before it could say anything"
        for message in self.receive():
            if isinstance(message, Hello):
                check_identity(message.identity, "the engine's process")
            elif isinstance(message, StartPhase):
                self._folder.remove()  # both ends are connected
                phase = message.text
                if on_progress is not None:
                    on_progress(phase)
            elif isinstance(message, Died):
                raise error_from_message(message.error)
            elif isinstance(message, Ready):
                return message
        raise self.death(None, f" at its start ({phase})")

    def send(self, message: ToEngine) -> None:
        """Returns at once; to a process that has ended, it goes nowhere. Not from a forked process."""
        if os.getpid() != self._owner:
            raise EngineDeadError("an engine does not live on in a forked process; start one there")
        self._outgoing.send(self._to_engine.encode(message))

    def receive(self) -> Iterator[FromEngine]:
        """Messages as they come, until the process has ended and all that it said was read."""
        has_ended = False
        while not has_ended:
            has_ended = bool(self._incoming.wait(None, [self._child.sentinel]))
            while (frame := self._incoming.receive()) is not None:
                if (message := self._codec.decode(frame)) is not None:
                    yield message

    def dump_stacks(self, path: Path | None = None) -> str:
        """The Python stacks of this process, the engine and its workers, whatever they are busy with.

        They are written to a new file at `path`, too, which an EngineDeadError names later.
        """
        text = f"{own_stacks()}\n{self.stacks.dump()}"
        if path is not None:
            save_stacks(text, path)
            self._dump_path = path
        return text

    def note_end(self) -> None:
        """Write into its progress that it has ended, which it may not have come to."""
        self.progress.enter(EnginePhase.ENDED)

    def kill(self) -> None:
        """SIGKILL, at once; its workers end with it."""
        self._child.kill()

    def abandon(self) -> None:
        """Kill it while another thread waits for its start, which cleans up if it comes to that; nothing is left."""
        self.kill()
        if os.getpid() == self._owner:
            self._folder.remove()

    def death(self, error: BaseException | None, when: str = "") -> EngineDeadError:
        """What to raise once it has ended, or has told that it ends on `error`."""
        end = self._child.wait(_DEATH_GRACE)
        last_lines: Sequence[str] = () if end is None else end.last_log_lines
        death = EngineDeadError(
            _why(error, end, when),
            process_exit_code=None if end is None else end.exit_code,
            signal=None if end is None else end.signal,
            last_log_lines=last_lines,
            dump_path=self._dump_path,
        )
        death.__cause__ = error.__cause__ if isinstance(error, EngineDeadError) else error
        return death

    def stop(self, grace: float | None = None) -> None:
        """End it after the step that runs, or kill it after `grace` seconds; returns once it is gone.

        None = as long as a long step takes.
        """
        if os.getpid() != self._owner:
            return
        seconds = STOP_GRACE if grace is None else grace
        if self._child.is_alive() and seconds > 0:
            self.send(Stop())
            self._child.wait(seconds)
        self._child.stop(grace=0)

    def close(self) -> None:
        """Give back sockets and files, by the thread that receives; after `stop`."""
        if os.getpid() == self._owner:
            self._outgoing.close()
            self._incoming.close()
            self._context.term()
            self._folder.remove()
            self.progress.close()
            self.stacks.close()
            self._child.close()


@contextlib.contextmanager
def _needs_space() -> Iterator[None]:
    """What is made inside takes a little room on a disk; where there is none, its user has to make some."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"the engine's process needs a temporary folder with some kilobytes of room: {error.strerror}; set "
            "TMPDIR to one that has it"
        ) from error


def _why(error: BaseException | None, end: ProcessEnd | None, when: str) -> str:
    if isinstance(error, EngineDeadError):
        return str(error)
    if error is not None:
        return f"the engine's process stopped on an error ({type(error).__name__}: {error}){EngineDeadError.ADVICE}"
    how = "closed its connection" if end is None else str(end)
    said = "" if end is None else _last_words(end.last_log_lines)
    return f"the engine's process {how}{when}{said}{EngineDeadError.ADVICE}"


def _last_words(lines: Sequence[str]) -> str:
    """The last line, unless it is one of those that all is well with, and has nothing to do with the end."""
    if not lines or _ALL_IS_WELL.match(lines[-1]):
        return ""
    return f" (its last line: {lines[-1].strip()})"
