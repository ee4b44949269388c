"""TraceReader: the rows of a trace file as requests, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from tokenyard.errors import ConfigError
from tokenyard.experiments.traces.lines import TraceLines

if TYPE_CHECKING:
    from tokenyard.interfaces.workload import WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What is done with rows that cannot be run, and how large the blocks of hashed prompts are."""

    zero_length: Literal["refuse", "skip"] = "refuse"  # rows without prompt or output tokens
    max_request_tokens: int | None = None  # prompt and output together; longer ones are left out
    tokens_per_hash: int = 512


class Columns(NamedTuple):
    """What the format calls the columns that it must have."""

    arrival: str
    prompt: str
    output: str


@dataclass(slots=True)
class LeftOut:
    """Rows that are no part of the workload, so far, by reason."""

    failed: int = 0  # of formats in which no output means that the request failed
    empty: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        reasons = [
            (self.failed, "without output, which failed"),
            (self.empty, "of zero length"),
            (self.too_long, "longer than workload.max_request_tokens"),
        ]
        return " and ".join(f"{count} {reason}" for count, reason in reasons if count)


class TraceReader(ABC):
    """A format. `rows` may be called several times and reads the file anew each time, holding one row."""

    columns: ClassVar[Columns]
    empty_output_is_failure: ClassVar[bool] = False
    starts_at_first_row: ClassVar[bool] = False  # times are of a clock; else they are seconds of the workload already

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path = path
        self.options = options
        self.left_out = LeftOut()  # in the last reading

    @property
    def has_content(self) -> bool:
        """Whether rows say what their prompts consist of."""
        return False

    @abstractmethod
    def parse(self, lines: TraceLines) -> Iterator[WorkloadRequest]:
        """Every row, its values checked one by one; counts `lines.row`. Lengths may be 0 here."""

    def rows(self) -> Iterator[WorkloadRequest]:
        """The requests, in order of arrival. Raises ConfigError at the first row that does not hold."""
        lines = TraceLines(self.path)
        self.left_out = left_out = LeftOut()
        last, origin = 0.0, None
        for request in self.parse(lines):
            if request.arrival < last:
                lines.wrong(
                    self.columns.arrival, request.arrival, f"in order of time, so at least {last}", "; sort the file"
                )
            last = request.arrival
            if not self._is_wanted(request, lines, left_out):
                continue
            if origin is None:
                origin = last if self.starts_at_first_row else 0.0
            yield replace(request, arrival=last - origin) if origin else request
        if origin is None:
            self._refuse_empty(lines, left_out)

    def _is_wanted(self, request: WorkloadRequest, lines: TraceLines, left_out: LeftOut) -> bool:
        if request.num_output_tokens < 1 and self.empty_output_is_failure:
            left_out.failed += 1
            return False
        if request.num_output_tokens < 1 or request.num_prompt_tokens < 1:
            if self.options.zero_length == "refuse":
                column = self.columns.prompt if request.num_prompt_tokens < 1 else self.columns.output
                remedy = "; workload.zero_length=skip leaves such rows out"
                lines.wrong(column, 0, "at least 1 token", remedy)
            left_out.empty += 1
            return False
        most = self.options.max_request_tokens
        if most is not None and request.num_prompt_tokens + request.num_output_tokens > most:
            left_out.too_long += 1
            return False
        return True

    def _refuse_empty(self, lines: TraceLines, left_out: LeftOut) -> None:
        why = f"all {lines.row} rows were left out: {left_out}" if lines.row else "there are no rows"
        raise ConfigError(f"{self.path}: {why}; a trace has at least one request")
