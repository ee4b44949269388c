"""A progress bar over requests, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.engine.output_processor import Update


@contextmanager
def request_progress(total: int, *, shown: bool) -> Iterator[Callable[[Update], None]]:
    """What to call with each step's changes. Shown only where stderr is a terminal: a log file has no use for it."""
    if not shown or not sys.stderr.isatty():
        yield lambda update: None
        return
    from rich.console import Console  # 0.1 s that a run without a bar need not spend
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task, started, num_tokens = progress.add_task("", total=total, rate=""), time.monotonic(), 0

        def on_update(update: Update) -> None:
            nonlocal num_tokens
            num_tokens += update.num_new_tokens
            rate = num_tokens / max(1e-9, time.monotonic() - started)
            progress.update(task, advance=len(update.finished), rate=f"{rate:.0f} tokens/s")

        yield on_update
