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

    def say(self, text: str) -> bool:
        """Stream the answer to one message to stdout. False after an error: told, and the conversation is as it was."""

    def reset(self) -> None:
        """Forget every turn."""


def converse(talker: Talker, name: str) -> bool:
    """Read a message a line from stdin until it ends; `name` is who answers, told where a person types.

    Returns whether all is well: every message has its answer, or a person has seen that one has none.
    """
    is_typed, is_answered = sys.stdin.isatty(), True
    if is_typed:
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
            is_answered = talker.say(line) and is_answered
    return is_typed or is_answered


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
