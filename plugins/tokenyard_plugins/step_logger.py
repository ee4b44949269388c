"""`observers=[step_logger]`: a line a step, to the log or as JSON to a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from tokenyard import ObserverDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import Observer

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces import ObserverContext
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoggerOptions:
    """Options, set as `observers=[{name: step_logger, every: 10}]`."""

    level: Literal["debug", "info", "warning"] = "info"  # of the log lines
    every: int = 1  # steps a line; what happened in them is added up
    path: str | None = None  # append JSON lines to this file instead of writing to the log


@dataclass(slots=True)
class _Totals:
    """What happened since the last line."""

    num_steps: int = 0
    num_rows: int = 0
    num_tokens: int = 0  # scheduled
    num_sampled: int = 0  # delivered
    num_new: int = 0
    num_resumed: int = 0
    num_finished: int = 0
    seconds: float = 0.0  # engine clock; time in which no step ran is left out

    def add(self, output: SchedulerOutput, result: EngineCoreOutputs, seconds: float) -> None:
        self.num_steps += 1
        self.num_rows += output.num_rows
        self.num_tokens += output.total_num_scheduled_tokens
        self.num_sampled += len(result.token_ids)
        self.num_new += len(output.new)
        self.num_resumed += len(output.resumed)
        self.num_finished += len(result.finished)
        self.seconds += seconds


class StepLogger(Observer):
    """Counts are of the steps since the last line, gauges are of the last step."""

    def __init__(self, options: StepLoggerOptions) -> None:
        self._every = options.every
        self._level = _LEVELS[options.level]
        self._file: TextIO | None = None if options.path is None else _open(options.path)
        self._totals = _Totals()
        self._last: tuple[SchedulerOutput, SchedulerStats | None] | None = None
        self._landed_at: float | None = None

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        # Under a loop with steps in flight this one was scheduled before the last one landed.
        began = output.scheduled_at if self._landed_at is None else max(output.scheduled_at, self._landed_at)
        self._landed_at = now
        self._totals.add(output, result, now - began)
        self._last = (output, result.stats)
        if self._totals.num_steps >= self._every:
            self._write()

    def on_shutdown(self) -> None:
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        if self._last is None:
            return
        (output, stats), totals = self._last, self._totals
        self._last, self._totals = None, _Totals()
        if self._file is not None:
            self._file.write(json.dumps(_row(output, stats, totals)) + "\n")
        elif logger.isEnabledFor(self._level):
            logger.log(self._level, "%s", _line(output, stats, totals))


def _open(path: str) -> TextIO:
    try:
        return open(path, "a", encoding="utf-8", buffering=1)  # closed in on_shutdown
    except OSError as error:
        raise ConfigError(f"step_logger: path={path!r} cannot be written ({error}); name a file that can be") from error


def _row(output: SchedulerOutput, stats: SchedulerStats | None, totals: _Totals) -> dict[str, object]:
    row: dict[str, object] = {
        "step": output.step,
        "num_steps": totals.num_steps,
        "num_rows": totals.num_rows,
        "num_tokens": totals.num_tokens,
        "num_sampled": totals.num_sampled,
        "num_new": totals.num_new,
        "num_resumed": totals.num_resumed,
        "num_finished": totals.num_finished,
        "seconds": totals.seconds,
    }
    if stats is not None:
        row |= {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "wait_reason": stats.wait_reason,
            "num_free_blocks": stats.num_free_blocks,
            "num_total_blocks": stats.num_total_blocks,
            "num_preemptions": stats.num_preemptions,
        }
    return row


def _line(output: SchedulerOutput, stats: SchedulerStats | None, totals: _Totals) -> str:
    steps = "" if totals.num_steps == 1 else f" ({totals.num_steps} steps)"
    text = (
        f"step {output.step}{steps}: {totals.num_rows} rows, {totals.num_tokens} tokens, {totals.num_sampled} sampled, "
        f"{totals.num_new} new, {totals.num_resumed} resumed, {totals.num_finished} finished"
    )
    if stats is not None:
        reason = f" ({stats.wait_reason})" if stats.wait_reason else ""
        text += (
            f"; {stats.num_running} running, {stats.num_waiting} waiting{reason}, "
            f"{stats.num_free_blocks}/{stats.num_total_blocks} blocks free"
        )
    return f"{text}; {totals.seconds * 1000:.1f} ms"


def _make(options: StepLoggerOptions, context: ObserverContext) -> Observer:
    if options.every < 1:
        raise ConfigError(f"step_logger: every={options.every} must be a whole number of steps, at least 1")
    return StepLogger(options)


@hookimpl
def tokenyard_observers() -> Iterator[ObserverDescriptor[StepLoggerOptions]]:
    yield ObserverDescriptor(
        name="step_logger",
        api_version=(1, 7),
        summary="a line a step: rows, tokens, who waits and why, free blocks, time",
        options_type=StepLoggerOptions,
        factory=_make,
    )
