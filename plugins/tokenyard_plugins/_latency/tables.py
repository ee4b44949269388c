"""CSV tables of measured times, plain or gzipped; mistakes are told with file, row and column."""

from __future__ import annotations

import csv
import gzip
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_BYTES = 256 << 20  # of a table, unpacked
MOST_TIME = 1e15  # whatever its unit
MOST_COUNT = 1 << 20  # tokens or sequences of a row


class Row:
    """One row of a table, by column."""

    __slots__ = ("_cells", "_columns", "_number", "_path")

    def __init__(self, path: Path, number: int, columns: dict[str, int], cells: list[str]) -> None:
        self._path = path
        self._number = number  # as an editor counts lines, the header is 1
        self._columns = columns
        self._cells = cells

    def text(self, column: str) -> str:
        return self._cells[self._columns[column]]

    def optional(self, column: str) -> str | None:
        """None where the table has no such column."""
        index = self._columns.get(column)
        return None if index is None else self._cells[index]

    def number(self, column: str) -> float:
        """From 0 to `MOST_TIME`. Raises ConfigError."""
        text = self._cells[self._columns[column]]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MOST_TIME:  # also refuses NaN
            raise self.error(column, f"{text!r} is not a number from 0 to {MOST_TIME:g}")
        return value

    def count(self, column: str) -> int:
        """A whole number from 0 to `MOST_COUNT`. Raises ConfigError."""
        value = self.number(column)
        if value > MOST_COUNT or value != int(value):
            raise self.error(column, f"{self.text(column)!r} is not a whole number from 0 to {MOST_COUNT}")
        return int(value)

    def optional_number(self, column: str) -> float:
        """0 where the table has no such column, or nothing in it."""
        return self.number(column) if self.optional(column) else 0.0

    def error(self, column: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: row {self._number}, column {column!r}: {problem}")


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a table that has at least these columns. Raises ConfigError."""
    reader = csv.reader(io.StringIO(_content(path), newline=""))
    try:
        header = next(reader, [])
        missing = [column for column in columns if column not in header]
        if missing:
            raise ConfigError(f"{path}: row 1 has no column {', '.join(map(repr, missing))}; it has {_told(header)}")
        index = {name: at for at, name in enumerate(header)}
        num_rows = 0
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ConfigError(f"{path}: row {reader.line_num} has {len(cells)} columns, the header {len(header)}")
            num_rows += 1
            yield Row(path, reader.line_num, index, cells)
    except csv.Error as error:
        raise ConfigError(f"{path}: row {reader.line_num}: {error}") from error
    if not num_rows:
        raise ConfigError(f"{path}: it has no rows")


def _content(path: Path) -> str:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: larger than {MOST_BYTES >> 20} MiB")
        return content.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _told(header: Sequence[str]) -> str:
    return ", ".join(map(repr, header[:20])) + (", ..." if len(header) > 20 else "") if header else "none"
