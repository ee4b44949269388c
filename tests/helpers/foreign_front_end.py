"""A front end that is not ours: it starts an engine's process and sends it what it likes."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

import zmq
from own_process import LETTERS, LIVENESS
from tokenyard.ipc.messages import Answer, Call, FromEngine, Launch, Ready, ToEngine, from_engine_codec, to_engine_codec
from tokenyard.ipc.processes import ChildProcess
from tokenyard.ipc.progress import Progress
from tokenyard.ipc.sockets import Channel, SocketFolder
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.engine_process import MODULE, launch_message


def launch_of(model: Path) -> Launch:
    """What our own front end would send for an engine of letters."""
    return launch_message(*load_engine_config([f"model.name={model}", "model.max_model_len=128", *LETTERS]))


class ForeignFrontEnd:
    """Reads what the engine says with the message types of ours."""

    def __init__(self) -> None:
        self.folder = SocketFolder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        addresses = [self.folder.address(name) for name in ("commands", "results")]
        self._outgoing = Channel(self._context, addresses[0], binds=False)
        self._incoming = Channel(self._context, addresses[1], binds=True)
        self.progress = Progress()
        self.child = ChildProcess(
            MODULE,
            "engine",
            arguments=[*addresses, str(self.progress.descriptor)],
            descriptors=[self.progress.descriptor],
        )
        self._from_engine, self._to_engine = from_engine_codec(), to_engine_codec()

    def send(self, message: ToEngine) -> None:
        self._outgoing.send(self._to_engine.encode(message))

    def send_raw(self, frame: bytes) -> None:
        self._outgoing.send(frame)

    def next(self, *kinds: type[FromEngine]) -> FromEngine:
        """The next message of one of these types; others are passed over."""
        deadline = time.monotonic() + LIVENESS
        while time.monotonic() < deadline:
            self._incoming.wait(0.1)
            if (frame := self._incoming.receive()) is not None:
                message = self._from_engine.decode(frame)
                if isinstance(message, kinds):
                    return message
        raise AssertionError(f"no {kinds} came; the process: {self.child.end}")

    def start(self, launch: Launch) -> None:
        """Until the engine takes requests."""
        self.send(launch)
        self.next(Ready)

    def num_dropped(self) -> int:
        """Asks the engine, which shows that it lives."""
        self.send(Call(1, "health"))
        answer = self.next(Answer)
        assert isinstance(answer, Answer)
        assert answer.error is None
        return answer.num_dropped_frames

    def __enter__(self) -> ForeignFrontEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.child.stop(0)
        self.child.close()
        self._outgoing.close()
        self._incoming.close()
        self._context.term()
        self.folder.remove()
        self.progress.close()
