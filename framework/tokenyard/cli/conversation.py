"""A chat: its messages, and what is typed into it: lines that are said, and commands that begin with a slash."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator

from tokenyard.cli.terminal import say

HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


class Conversation(ABC):
    """The messages so far; `say` adds to them."""

    def __init__(self, system: str | None) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = list(self._opening)

    @abstractmethod
    def say(self, text: str) -> bool:
        """Stream the answer to one message to stdout. False after an error: told, and the conversation is as it was."""

    def reset(self) -> None:
        """Forget every turn."""
        self._messages = list(self._opening)

    def _asked(self, text: str) -> list[dict[str, str]]:
        """The messages with one more, which only `_keep` makes a part of them."""
        return [*self._messages, {"role": "user", "content": text}]

    def _keep(self, asked: list[dict[str, str]], answer: str) -> None:
        self._messages = [*asked, {"role": "assistant", "content": answer}]


def converse(conversation: Conversation, name: str) -> bool:
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
            conversation.reset()
            say("(started over)")
        elif line.startswith("/"):
            say(HELP if line == "/help" else f"no command {line.split()[0]}: {HELP}")
        elif line:
            is_answered = conversation.say(line) and is_answered
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
