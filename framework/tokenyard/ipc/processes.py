"""Child processes of ours: a clean interpreter each, that never outlives its parent and whose death is noticed at once.

A child runs `main()` of a module of ours, which begins with `tokenyard.ipc.child.begin_child`. It is started as
`python -c`, so it knows nothing of the parent's script: no main guard is needed, and no threads are forked.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tokenyard.errors import UserError
from tokenyard.ipc.stacks import inherited_stacks

_KEPT_LINES = 40  # of what a child says
_LONGEST_LINE = 1000  # characters that are kept of one
_PUMP_GRACE = 0.3  # seconds in which the last words of a dead process arrive
_BOOT = """'tokenyard {name}'; import json, sys
sys.path[:] = json.loads(sys.argv[1])['path']
from {module} import main
main()"""  # the name comes first, for who looks at `ps`


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended."""

    exit_code: int | None  # None when a signal ended it
    signal: str | None  # its name, such as SIGKILL
    last_log_lines: tuple[str, ...]  # of its stderr and stdout, the last ones

    def __str__(self) -> str:
        """`was killed by SIGKILL` or `ended with exit code 1`."""
        return f"was killed by {self.signal}" if self.signal else f"ended with exit code {self.exit_code}"


class ChildProcess:
    """One child, from its start to its end. Its stderr and stdout go on to this process's stderr.

    It ends when this process does, however that ends, and when its stdin is closed, which `stop` does first. `name` is
    what logs and stacks call it. It gets this process's environment and `sys.path`, and of its open files those in
    `descriptors` under their numbers.
    """

    def __init__(
        self,
        module: str,
        name: str,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        stacks: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """`environment` comes on top of this process's. `stacks`: see `Stacks`; None = where this process's go.

        `folder` is removed by the child where this process goes before it could.
        """
        self.name = name
        self._start = _Start(
            module, name, tuple(arguments), dict(environment or {}), tuple(descriptors), stacks, folder
        )
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._end: ProcessEnd | None = None
        self._ended = threading.Event()
        self._owner = os.getpid()
        self.sentinel, self._sentinel_writer = os.pipe()
        self._close_sentinel = weakref.finalize(self, os.close, self.sentinel)
        started: Future[subprocess.Popen[bytes]] = Future()
        # The kernel ends a child with the thread that started it, so that one must live as long as the child.
        self._waiter = threading.Thread(target=self._run, args=(started,), name=f"tokenyard-{name}-waiter", daemon=True)
        self._waiter.start()
        self._process = started.result()
        self.pid = self._process.pid

    @property
    def end(self) -> ProcessEnd | None:
        """How it ended; None while it lives. `sentinel` is a file descriptor that is readable once it has ended."""
        return self._end

    def is_alive(self) -> bool:
        return self._end is None

    def last_lines(self) -> list[str]:
        """The last ones that it has said so far."""
        return list(self._lines)

    def wait(self, seconds: float | None = None) -> ProcessEnd | None:
        """Wait for its end; None when the time is up."""
        self._ended.wait(seconds)
        return self._end

    def ask_to_end(self) -> None:
        """Close its stdin, on which it ends; returns at once."""
        if os.getpid() == self._owner and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """SIGKILL, at once; nothing when it has ended."""
        if os.getpid() == self._owner and self.is_alive():
            with contextlib.suppress(OSError):
                self._process.kill()

    def stop(self, grace: float = 5.0) -> None:
        """Ask it to end, kill it after `grace` seconds, and wait until it is gone; in a forked process do nothing."""
        if os.getpid() != self._owner:
            return
        self.ask_to_end()
        if self.wait(grace) is None:
            self.kill()
            self.wait()
        self._waiter.join()

    def close(self) -> None:
        """Give the sentinel back, once nobody waits for it; otherwise it goes with this object."""
        self._close_sentinel()

    # In a thread of its own

    def _run(self, started: Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = self._start.popen()
        except OSError as error:
            os.close(self._sentinel_writer)
            started.set_exception(UserError(f"the process '{self.name}' does not start: {error}"))
            return
        except BaseException as error:
            os.close(self._sentinel_writer)
            started.set_exception(error)
            return
        pump = threading.Thread(target=self._pump, args=(process,), name=f"tokenyard-{self.name}-log", daemon=True)
        pump.start()
        started.set_result(process)
        code = process.wait()
        pump.join(_PUMP_GRACE)  # a process of its own may hold the pipe open for longer
        self._end = ProcessEnd(code if code >= 0 else None, _signal_name(code), tuple(self._lines))
        self._ended.set()
        os.close(self._sentinel_writer)

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            rest = b""
            while chunk := os.read(pipe.fileno(), 65536):
                *lines, rest = (rest + chunk).split(b"\n")
                self._lines.extend(line.decode(errors="replace")[:_LONGEST_LINE] for line in lines if line.strip())
                rest = rest[-65536:]
                _to_stderr(chunk)
            if rest.strip():
                self._lines.append(rest.decode(errors="replace")[:_LONGEST_LINE])


@dataclass(frozen=True, slots=True)
class _Start:
    """What a child is started with."""

    module: str
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    descriptors: Sequence[int]
    stacks: int | None
    folder: Path | None

    def popen(self) -> subprocess.Popen[bytes]:
        if not sys.executable:
            raise OSError("this Python does not know its own executable (sys.executable is empty)")
        stacks = inherited_stacks() if self.stacks is None else self.stacks
        told = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "name": self.name,
            "parent": os.getpid(),
            "stacks": stacks,
            "folder": None if self.folder is None else str(self.folder),
            "arguments": list(self.arguments),
        }
        boot = _BOOT.format(name=self.name, module=self.module)
        return subprocess.Popen(
            [sys.executable, *_interpreter_flags(), "-c", boot, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment},
            pass_fds=[*self.descriptors, *([] if stacks is None else [stacks])],
            process_group=0,  # a Ctrl-C in a terminal is for the parent
        )


def _interpreter_flags() -> list[str]:
    """`-P`: the folder that the parent happens to be in is no place to import from, unless its own path has it."""
    warnings = [word for option in sys.warnoptions for word in ("-W", option)]
    return ["-P", *(["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []), *warnings]


def _signal_name(code: int) -> str | None:
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _to_stderr(chunk: bytes) -> None:
    """Past sys.stderr and its lock: this thread may be stopped at any point when the interpreter ends."""
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):  # nobody listens, or the disk is full
        rest = memoryview(chunk)
        while rest:
            rest = rest[os.write(2, rest) :]


def has_ended(sentinels: Sequence[int], seconds: float = 0.0) -> list[int]:
    """Those of the sentinels whose processes have ended, waiting so long for the first one."""
    poll = select.poll()
    for sentinel in sentinels:
        poll.register(sentinel, select.POLLIN | select.POLLHUP)
    return [descriptor for descriptor, _ in poll.poll(max(0, round(seconds * 1000)))]
