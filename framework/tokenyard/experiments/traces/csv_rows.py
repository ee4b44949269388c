"""Rows of a CSV file by the names of their columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.experiments.traces.lines import TraceLines, shown


def csv_rows(lines: TraceLines, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[list[str]]:
    """The cells of `columns`, then of `optional`, which are "" where the file has no such column; others are ignored.

    Raises ConfigError for a header that lacks one or has one twice, and for a row of another width.
    """
    reader = csv.reader(iter(lines), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        places = _places(lines, header, columns, optional)
        for cells in reader:
            lines.row += 1
            if len(cells) != len(header):
                lines.malformed(f"has {len(cells)} columns; the header has {len(header)}: {', '.join(header)}")
            yield [cells[place] if place is not None else "" for place in places]
    except csv.Error as error:
        lines.malformed(f"is not CSV: {error}")


def _places(
    lines: TraceLines, header: Sequence[str], columns: Sequence[str], optional: Sequence[str]
) -> list[int | None]:
    if not header:
        raise ConfigError(f"{lines.path}: the file is empty; its first line must name the columns {', '.join(columns)}")
    for name in columns:
        if name not in header:
            raise ConfigError(
                f"{lines.path}: row 0 (line {lines.number}), column '{name}': missing{did_you_mean(name, header)}; "
                f"the header is {shown(','.join(header))}, and the columns {', '.join(columns)} must be there"
            )
    for name in (*columns, *optional):
        if header.count(name) > 1:
            raise ConfigError(f"{lines.path}: row 0 (line {lines.number}), column '{name}': is there twice; keep one")
    return [header.index(name) if name in header else None for name in (*columns, *optional)]
