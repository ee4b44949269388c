"""A progress bar over requests: our own on stderr, or one that the user's function makes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from tokenyard.engine.output_processor import Update


class ProgressBar(Protocol):
    """What is needed of a bar that the user makes; tqdm's fits."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> object: ...


ProgressBarFactory: TypeAlias = "Callable[..., ProgressBar]"
"""Called with `total`, a number of requests, and `desc`."""

OnStep: TypeAlias = "Callable[[Sequence[str], Update], None]"


@contextmanager
def request_progress(prompt_lens: Sequence[int], shown: bool | ProgressBarFactory) -> Iterator[OnStep]:
    """What to call with the request ids, in the order of `prompt_lens`, and each step's changes.

    Our own bar is shown only where stderr is a terminal: a log file has no use for it.
    """
    if callable(shown):
        bar = shown(total=len(prompt_lens), desc="Processed prompts")
        try:
            yield _Count(prompt_lens, lambda count: _advance(bar, count))
        finally:
            bar.close()
    elif shown and sys.stderr.isatty():
        with _own_bar(len(prompt_lens)) as show:
            yield _Count(prompt_lens, show)
    else:
        yield lambda request_ids, update: None


class _Count:
    """Counts a run's requests and tokens; others that run along are not counted."""

    def __init__(self, prompt_lens: Sequence[int], show: Callable[[_Count], None]) -> None:
        self.num_new = 0  # requests that this step has finished
        self._prompt_lens = prompt_lens
        self._lens: dict[str, int] = {}
        self._show = show
        self._num_input = self._num_output = 0
        self._started = time.monotonic()

    def __call__(self, request_ids: Sequence[str], update: Update) -> None:
        if not self._lens:
            self._lens = dict(zip(request_ids, self._prompt_lens, strict=True))
        finished = [self._lens[request_id] for request_id in update.finished if request_id in self._lens]
        self.num_new = len(finished)
        self._num_input += sum(finished)
        self._num_output += update.num_new_tokens
        self._show(self)

    @property
    def rates(self) -> str:
        """Prompt tokens of finished requests, and output tokens, by second."""
        seconds = max(1e-9, time.monotonic() - self._started)
        return f"{self._num_input / seconds:.0f} input, {self._num_output / seconds:.0f} output tokens/s"


def _advance(bar: ProgressBar, count: _Count) -> None:
    postfix = getattr(bar, "set_postfix_str", None)  # a user's bar may have tqdm's place for it
    if callable(postfix):
        postfix(count.rates, refresh=False)
    if count.num_new:
        bar.update(count.num_new)


@contextmanager
def _own_bar(total: int) -> Iterator[Callable[[_Count], None]]:
    from rich.console import Console  # 0.1 s that a run without a bar need not spend
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task("", total=total, rates="")
        yield lambda count: progress.update(task, advance=count.num_new, rates=count.rates)
