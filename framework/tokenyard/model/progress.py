"""A progress bar on stderr, only where someone watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(steps)`; shows a bar when stderr is a terminal, and nothing otherwise."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _nothing
        return
    # 40 ms, and only for a person who waits anyway
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)


def _nothing(steps: int) -> None:
    """Nobody watches."""
