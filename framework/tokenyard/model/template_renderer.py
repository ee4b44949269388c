"""Rendering chat templates in a process of their own: started when first needed, ended at a deadline, started anew.

The processes talk in lines of JSON over pipes: nothing that comes back can be more than text. The renderer's process
ends with its parent (its stdin does), knows none of the parent's secrets (its environment is all but empty), and is not
reached by a Ctrl-C that is meant for the parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from tokenyard.model.chat_messages import PlainValue
    from tokenyard.model.template_process import TemplateAnswer, TemplateRequest

DEADLINE_SECONDS = 5.0
_START_SECONDS = 60.0  # a busy machine may be slow to start a process; a template is not to blame for it
_HEADROOM_SECONDS = 0.5  # the process itself says so at its deadline, unless it is stuck in one long operation
_MAX_KNOWN = 16  # templates whose names are remembered
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TZ", "LANG", "LC_ALL", "LC_TIME")
_NO_CONSOLE = 0x08000200 if sys.platform == "win32" else 0  # no window, and a process group of its own
_BOOT = (
    "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\nfrom tokenyard.model.template_process import main\nmain()"
)


class TemplateFailedError(TokenyardError):
    """A template that does not compile, refuses what it is given, or takes too much of anything; one line says why."""


class TemplateRenderer:
    """Renders one template at a time. Safe to share between threads, and to use on both sides of a fork."""

    def __init__(self, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._deadline = deadline_seconds
        self._names: dict[str, frozenset[str]] = {}
        self._process: _RenderingProcess | None = None
        self._pid, self._lock = os.getpid(), threading.Lock()

    def names(self, template: str) -> frozenset[str]:
        """The variables that a template reads and does not set itself; TemplateFailedError when it does not compile."""
        if template not in self._names:
            answer = self._ask({"template": template, "seconds": self._deadline})
            if len(self._names) >= _MAX_KNOWN:
                self._names.clear()
            self._names[template] = frozenset(answer["names"])
        return self._names[template]

    def render(self, template: str, variables: Mapping[str, PlainValue]) -> str:
        """What a template makes of its variables; TemplateFailedError at the latest after the deadline."""
        request: TemplateRequest = {"template": template, "variables": dict(variables), "seconds": self._deadline}
        return self._ask(request)["text"]

    def close(self) -> None:
        """End the process; another render starts a new one."""
        if os.getpid() == self._pid:
            with self._lock:
                self._stop()

    def _ask(self, request: TemplateRequest) -> TemplateAnswer:
        line = json.dumps(request).encode() + b"\n"
        if os.getpid() != self._pid:
            self._let_go_after_fork()
        with self._lock:
            if self._process is None or not self._process.is_usable:
                self._stop()
                self._process = _RenderingProcess()
            answer = self._process.ask(line, self._deadline)
        if "error" in answer:
            raise TemplateFailedError(answer["error"])
        return answer

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _let_go_after_fork(self) -> None:
        """The parent's process and lock, which may be held, are the parent's."""
        self._process, self._pid, self._lock = None, os.getpid(), threading.Lock()


class _RenderingProcess:
    """One process, from its start to its end. Not for two threads at a time."""

    def __init__(self) -> None:
        self._expired = False
        with tempfile.TemporaryFile() as complaints:
            self._process, self._requests, self._answers = _start(complaints)
            self.stop = weakref.finalize(self, _stop, self._process, self._requests, self._answers, os.getpid())
            if not self._exchange(b"", _START_SECONDS):
                complaints.seek(0)
                lines = complaints.read().decode(errors="replace").splitlines() or ["it says nothing"]
                raise UserError(f"the process that renders chat templates does not start: {lines[-1][:300]}")

    @property
    def is_usable(self) -> bool:
        return not self._expired and self.stop.alive and self._process.poll() is None

    def ask(self, line: bytes, seconds: float) -> TemplateAnswer:
        """The answer to a request; TemplateFailedError when there is none in time, and then the process has ended."""
        if line_of_answer := self._exchange(line, seconds + _HEADROOM_SECONDS):
            answer: TemplateAnswer = json.loads(line_of_answer)
            return answer
        if self._expired:
            raise TemplateFailedError(f"the template takes longer than {seconds:g} s")
        raise TemplateFailedError(f"the template ends the process that renders it (code {self._process.returncode})")

    def _exchange(self, line: bytes, seconds: float) -> bytes:
        """Send a line and wait for one; empty when the process ended first, which it does when the time is up."""
        timer = threading.Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            answer = self._send_and_receive(line)
        except BaseException:  # an answer that nobody took would be taken for the next request's
            self.stop()
            raise
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return answer
        self.stop()
        return b""

    def _send_and_receive(self, line: bytes) -> bytes:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._requests.fileno(), rest) :]
            return self._answers.readline()
        except OSError:  # the pipe's other end is gone
            return b""

    def _expire(self) -> None:
        self._expired = True
        self._process.kill()


def _start(complaints: IO[bytes]) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """(process, pipe for requests, pipe of answers)."""
    its_requests, our_requests = os.pipe()
    our_answers, its_answers = os.pipe()
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT, search_path],
            stdin=its_requests,
            stdout=its_answers,
            stderr=complaints,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,
            creationflags=_NO_CONSOLE,
        )
    except OSError as error:
        os.close(our_requests)
        os.close(our_answers)
        raise UserError(f"the process that renders chat templates does not start: {error}") from error
    finally:
        os.close(its_requests)
        os.close(its_answers)
    return process, os.fdopen(our_requests, "wb", buffering=0), os.fdopen(our_answers, "rb")


def _stop(process: subprocess.Popen[bytes], requests: IO[bytes], answers: IO[bytes], parent: int) -> None:
    """End the process, which keeps nothing; in a fork of its parent just let go of it."""
    requests.close()
    if os.getpid() == parent:
        process.kill()
        process.wait()
    answers.close()
