"""Format `azure`: the Azure LLM inference traces of 2023 and 2024."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from tokenyard.experiments.traces.csv_rows import csv_rows
from tokenyard.experiments.traces.reader import Columns, TraceReader
from tokenyard.experiments.traces.values import token_cell
from tokenyard.interfaces.workload import WorkloadRequest

if TYPE_CHECKING:
    from tokenyard.experiments.traces.lines import TraceLines

_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1)
_ALLOWED = "a time such as 2023-11-16 18:15:46.6805900"


class AzureReader(TraceReader):
    """CSV with a date and time, context tokens and generated tokens."""

    columns = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    starts_at_first_row = True

    def parse(self, lines: TraceLines) -> Iterator[WorkloadRequest]:
        first: int | None = None
        for time, prompt, output in csv_rows(lines, self.columns):
            now = nanoseconds(lines, self.columns.arrival, time)
            if first is None:
                first = now
            yield WorkloadRequest(
                arrival=(now - first) / 1e9,
                num_prompt_tokens=token_cell(lines, self.columns.prompt, prompt),
                num_output_tokens=token_cell(lines, self.columns.output, output),
            )


def nanoseconds(lines: TraceLines, column: str, text: str) -> int:
    """A date and time with up to nine fractional digits, exact, since 1970; without a zone it is UTC."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        lines.wrong(column, text, _ALLOWED)
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        since = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second)) - _EPOCH
    except ValueError:  # the 31st of a month that has none
        lines.wrong(column, text, _ALLOWED)
    seconds = since.days * 86400 + since.seconds - _offset(zone)
    return seconds * 10**9 + int((fraction or "").ljust(9, "0"))


def _offset(zone: str | None) -> int:
    if zone is None or zone == "Z":
        return 0
    seconds = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
    return -seconds if zone[0] == "-" else seconds
