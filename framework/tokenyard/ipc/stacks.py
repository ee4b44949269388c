"""Python stacks of processes that may not answer any more: written by a signal handler, to a file without a name."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "TOKENYARD_STACKS"
_QUIET = 0.15  # seconds without a new byte after which a dump is taken to be whole
_POLL = 0.02
_MOST = 2**20  # bytes of one process's stacks that are read


class Stacks:
    """Of a child and its children. `descriptor` goes to `ChildProcess(stacks=...)`; they hand it on by themselves."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # open until `close`
        self.descriptor = self._file.fileno()
        os.set_inheritable(self.descriptor, False)  # to those that it is passed to alone
        self._lock = threading.Lock()

    def dump(self, seconds: float = 2.0) -> str:
        """The stacks of all threads of every process that lives, each with its name; `seconds` for each of them."""
        with self._lock:
            if self._file.closed:
                return ""
            return "\n".join(
                f"== {name} (process {pid})\n{text}"
                for pid, name in self._processes()
                if (text := self._dump_one(pid, seconds)) is not None
            )

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Those that have introduced themselves: see `register_stacks`."""
        text = _read(self.descriptor, 0)
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            pid, _, name = rest.partition(" ")
            if word == _VARIABLE and pid.isdigit():
                yield int(pid), name

    def _dump_one(self, pid: int, seconds: float) -> str | None:
        start = size = os.fstat(self.descriptor).st_size
        try:
            os.kill(pid, signal.SIGUSR1)
        except OSError:
            return None  # it has ended
        deadline = time.monotonic() + seconds
        quiet_until = deadline
        while (now := time.monotonic()) < min(deadline, quiet_until):
            time.sleep(_POLL)
            if (new_size := os.fstat(self.descriptor).st_size) != size:
                size, quiet_until = new_size, now + _POLL + _QUIET
        return _read(self.descriptor, start) or "(no answer)\n"


def register_stacks(descriptor: int | None, name: str) -> None:
    """In a child: answer SIGUSR1 with the stacks of all threads, whatever the interpreter is busy with.

    A fatal error, such as a segmentation fault, writes them to stderr.
    """
    faulthandler.enable()
    if descriptor is None:
        return
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True, chain=False)
    os.write(descriptor, f"{_VARIABLE} {os.getpid()} {name}\n".encode())
    os.environ[_VARIABLE] = f"{os.getpid()}:{descriptor}"


def inherited_stacks() -> int | None:
    """The descriptor that this process was given, for its own children; None when it is nobody's child."""
    pid, _, descriptor = os.environ.get(_VARIABLE, "").partition(":")
    return int(descriptor) if pid == str(os.getpid()) and descriptor.isdigit() else None


def own_stacks() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read(_MOST).decode(errors="replace")


def save_stacks(text: str, path: Path) -> None:
    """Keep a dump, readable for its owner alone."""
    with contextlib.suppress(OSError), open(path, "x", opener=_private, encoding="utf-8") as file:
        file.write(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _read(descriptor: int, offset: int) -> str:
    return os.pread(descriptor, _MOST, offset).decode(errors="replace")
