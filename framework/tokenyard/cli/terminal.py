"""stdin, stdout and stderr as a command finds them: closed, full, or of another encoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def progress_bar(total: int | None, name: str, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """What to call after each of `total` steps; there is a bar only where stderr is a terminal."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # 0.1 s that a run without a bar need not spend
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
