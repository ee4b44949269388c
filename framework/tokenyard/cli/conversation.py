"""What is typed into a chat: lines that are said, and commands that begin with a slash."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from tokenyard.cli.terminal import say

HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


class Talker(Protocol):
    """Who answers."""

    def say(self, text: str) -> None:
        """Stream the answer to one message to stdout; errors are told, and leave the conversation as it was."""

    def reset(self) -> None:
        """Forget every turn."""


def converse(talker: Talker, name: str) -> None:
    """Read a message a line from stdin until it ends; `name` is who answers, told where a person types."""
    if sys.stdin.isatty():
        say(f"{name}: {HELP}")
    for line in _lines():
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            talker.reset()
            say("(started over)")
        elif line.startswith("/"):
            say(HELP if line == "/help" else f"no command {line.split()[0]}: {HELP}")
        elif line:
            talker.say(line)


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # not on every system
        import readline  # noqa: F401 - line editing and history for input()
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /exit ends)")
