"""stdin, stdout and stderr as a command finds them: closed, full, or of another encoding."""

from __future__ import annotations

import sys

from tokenyard.errors import UserError


def say(text: str) -> None:
    """A line for people, to stderr; nowhere when that is closed."""
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def prepare_streams() -> None:
    """Text that stdout's encoding lacks is shown as escapes instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # absent where a test or an IDE has put its own object
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def read_stdin() -> str:
    """All of stdin."""
    if sys.stdin is None:
        raise UserError("stdin is closed; give the prompt as an argument")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"stdin is not {error.encoding} text: {error.reason} at byte {error.start}") from error
