"""ZeroMQ over `ipc://` in a folder that nobody else can enter."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import zmq

from tokenyard.errors import UserError

_PREFIX = "ty-"
_MAX_PATH = 100  # bytes; the operating system takes 107, with the terminating 0 108
_LONGEST_NAME = 16
_RECONNECT_MS = 5  # between the first tries to connect to somebody who has not bound yet
_LONGEST_FOLDER = _MAX_PATH - _LONGEST_NAME - 1


class SocketFolder:
    """A fresh folder of mode 0700 for sockets, with a path that is short enough for their addresses.

    It may be removed as soon as both ends are connected: they stay so, and nothing is left if all processes are killed.
    """

    def __init__(self) -> None:
        self.path = _fresh_folder()
        self._process = os.getpid()

    def address(self, name: str) -> str:
        """Of a socket in this folder; names have up to 16 characters."""
        if not name or len(name) > _LONGEST_NAME or "/" in name:
            raise ValueError(f"a socket's name has 1 to {_LONGEST_NAME} characters, got {name!r}")
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Remove it with what is in it; a second call, and one in a forked process, does nothing."""
        if os.getpid() == self._process:
            shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> SocketFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


class Channel:
    """One end of a connection between two processes, either way. ZeroMQ refuses a third who connects.

    The end that binds waits in `send` for as long as nobody is at the other end; the one that connects never does: what
    it sends is kept until somebody is there, or goes nowhere. So a parent connects to where its child binds.

    `send` may be called from any thread; `receive` and `wait` are for one thread at a time, not the sender's. Two
    channels, one for each direction, keep the senders and the receiver of a process from waiting for each other.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, binds: bool) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what is in flight is bounded by the requests that there are
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 20 * _RECONNECT_MS)
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            if binds:
                self._socket.bind(address)
            else:
                self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(f"no socket at {address}: {error}") from error

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    def send(self, frame: bytes) -> None:
        """Hand over one frame; after `close` it goes nowhere."""
        with self._lock:
            if not self._is_closed:
                self._socket.send(frame)

    def receive(self) -> bytes | None:
        """The next frame that has come, or None; never waits."""
        with contextlib.suppress(zmq.Again):
            return self._socket.recv(zmq.NOBLOCK)
        return None

    def wait(self, seconds: float | None, others: Sequence[int] = ()) -> Sequence[int] | None:
        """Until a frame has come, one of these file descriptors is readable, or the time is up (None = never).

        Returns the descriptors that are readable; None when there are none and no frame.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in others:
            poller.register(descriptor, zmq.POLLIN)
        ready = dict(poller.poll(None if seconds is None else max(0, round(seconds * 1000))))
        if not ready:
            return None
        return [descriptor for descriptor in others if descriptor in ready]

    def close(self, linger: int = 0) -> None:
        """By the thread that receives. What was sent has `linger` ms to arrive; a second call does nothing.

        It is ended with the context, whose end waits for that.
        """
        with self._lock:
            self._is_closed = True
            self._socket.close(linger)


def _fresh_folder() -> Path:
    refusals = []
    for base in _bases():
        if len(os.fsencode(base)) + len(f"/{_PREFIX}12345678") > _LONGEST_FOLDER:
            refusals.append(f"{base}: the path is too long for a socket")
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            refusals.append(f"{base}: {error.strerror}")
    raise UserError(
        f"there is no folder for sockets ({'; '.join(refusals)}); set TMPDIR to a folder with a path of at most "
        f"{_LONGEST_FOLDER - len(_PREFIX) - 9} bytes that can be written to"
    )


def _bases() -> list[str]:
    """Where temporary folders go, and where they may go when that path is too long."""
    chosen = os.path.abspath(tempfile.gettempdir())
    return list(dict.fromkeys([chosen, os.environ.get("XDG_RUNTIME_DIR") or "/tmp", "/tmp"]))  # noqa: S108  # a fresh folder in it
