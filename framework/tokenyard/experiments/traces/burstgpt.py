"""Format `burstgpt`: the traces of BurstGPT (arXiv 2401.17644)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard.experiments.traces.csv_rows import csv_rows
from tokenyard.experiments.traces.reader import Columns, TraceReader
from tokenyard.experiments.traces.values import optional_text, second_cell, token_cell
from tokenyard.interfaces.workload import WorkloadRequest

if TYPE_CHECKING:
    from tokenyard.experiments.traces.lines import TraceLines

_SESSION = "Session ID"


class BurstGPTReader(TraceReader):
    """CSV with seconds since the first day's beginning; a response without tokens is a request that failed."""

    columns = Columns("Timestamp", "Request tokens", "Response tokens")
    empty_output_is_failure = True
    starts_at_first_row = True

    def parse(self, lines: TraceLines) -> Iterator[WorkloadRequest]:
        for time, prompt, output, session in csv_rows(lines, self.columns, [_SESSION]):
            yield WorkloadRequest(
                arrival=second_cell(lines, self.columns.arrival, time),
                num_prompt_tokens=token_cell(lines, self.columns.prompt, prompt),
                num_output_tokens=token_cell(lines, self.columns.output, output),
                session=optional_text(lines, _SESSION, session.strip() or None),
            )
