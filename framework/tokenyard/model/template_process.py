"""The process that chat templates run in, started and stopped by `template_renderer`.

A template is somebody else's program, and one built-in filter on a long text can take longer than any meter inside the
interpreter notices. Here it can be ended from outside, its memory is limited, and nothing is near that is worth having:
this imports Jinja and no part of the engine. It reads a request a line from stdin and writes an answer a line to
stdout, both JSON, and ends when stdin does.

    {"template": text}                                        -> {"names": [what the template reads of its variables]}
    {"template": text, "variables": {...}, "seconds": number} -> {"text": what it makes of them}
    whatever goes wrong                                       -> {"error": one line}
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, TypedDict

from tokenyard.model.template_sandbox import TemplateSandbox

if TYPE_CHECKING:
    from jinja2 import Template

MAX_MEMORY = 512 * 2**20  # bytes of address space, where the system can limit it
GRACE_SECONDS = 2.0  # after its deadline a rendering ends itself, should nobody be left to end it
_MAX_COMPILED = 8  # templates; a model has one or two


class TemplateRequest(TypedDict, total=False):
    """A line of stdin; without `variables` it asks for the template's names."""

    template: str
    variables: dict[str, object]
    seconds: float


class TemplateAnswer(TypedDict, total=False):
    """A line of stdout: one of these."""

    text: str
    names: list[str]
    error: str


def main() -> None:
    """Serve until stdin ends."""
    _limit_resources()
    answers = _take_stdout()
    server = _Server()
    answers.write(b"{}\n")  # it runs: from here on deadlines count
    for line in sys.stdin.buffer:
        answers.write(json.dumps(server.answer(json.loads(line))).encode() + b"\n")


class _Server:
    def __init__(self) -> None:
        self._sandbox = TemplateSandbox()
        self._compiled: dict[str, Template] = {}

    def answer(self, request: TemplateRequest) -> TemplateAnswer:
        seconds = request.get("seconds", 0.0)
        try:
            with _ended_after(seconds + GRACE_SECONDS):
                if "variables" not in request:
                    return {"names": sorted(self._sandbox.undeclared_names(request["template"]))}
                return {
                    "text": self._sandbox.render(self._template(request["template"]), request["variables"], seconds)
                }
        except MemoryError:
            return {"error": f"the template needs more than {MAX_MEMORY // 2**20} MiB of memory"}
        except Exception as error:  # anything at all may be raised by somebody else's template
            return {"error": " ".join(str(error).split())[:500] or type(error).__name__}

    def _template(self, source: str) -> Template:
        if source not in self._compiled:
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            self._compiled[source] = self._sandbox.compile_template(source)
        return self._compiled[source]


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """A signal that nobody handles ends this process, whatever it is busy with (not on Windows)."""
    if sys.platform == "win32":
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_resources() -> None:
    if sys.platform == "win32":
        return
    import resource

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for kind, limit in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # lower already, or not for this system
            resource.setrlimit(kind, (limit, limit))


def _take_stdout() -> BinaryIO:
    """The pipe to the parent, which nothing else can write to by accident."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return answers
