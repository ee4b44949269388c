"""The progress of an experiment on stderr: a bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from tokenyard.cli.terminal import say

if TYPE_CHECKING:
    from rich.progress import Progress

    from tokenyard.experiments.multirun import Outcome


class RunProgress:
    """`tell` may be called from another thread; runs that failed are told as lines in any case."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_done = self._num_made = 0
        self._began = time.monotonic()
        self._bar = _bar() if sys.stderr is not None and sys.stderr.isatty() else None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.add_task("runs", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, outcome: Outcome) -> None:
        """A run has ended."""
        with self._lock:
            self._num_done += 1
            self._num_made += outcome.status != "skipped"
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0])
                if outcome.status == "failed":
                    self._bar.console.print(self._line(outcome), markup=False, highlight=False)
            else:
                say(f"[{self._num_done}/{self._total}] {self._line(outcome)}{self._left()}")

    def _line(self, outcome: Outcome) -> str:
        which = f"run {outcome.run.number}" + "".join(f" {one}" for one in outcome.run.varying)
        if outcome.status == "failed":
            return f"{which}: failed: {outcome.error}"
        if outcome.status == "skipped":
            return f"{which}: was done before"
        return f"{which}: {outcome.seconds:.1f} s"

    def _left(self) -> str:
        """By what the runs so far took; those that were done before took nothing."""
        left = self._total - self._num_done
        if not left or not self._num_made:
            return ""
        seconds = (time.monotonic() - self._began) / self._num_made * left
        return f", about {seconds:.0f} s left"


def _bar() -> Progress:
    from rich.console import Console  # 0.1 s that a run without a bar need not spend
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=2)
