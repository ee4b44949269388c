"""Histograms of lengths, from CSV files: packaged ones by name, others by path."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MOST_TOKENS = 2**24  # of a length
_MOST_BINS = 100_000
_MOST_CHARACTERS = 1000  # of a line
_COLUMNS = (["low", "high", "count"], ["length", "count"])


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bins of lengths, their ends included, and how many fell into each."""

    lows: Sequence[int]
    highs: Sequence[int]
    counts: Sequence[int]


def packaged_histograms() -> list[str]:
    """The names of those that come with the package; their folder's README says whose they are."""
    return sorted(file.name.removesuffix(".csv") for file in _folder().iterdir() if file.name.endswith(".csv"))


def read_histogram(given: str) -> Histogram:
    """A packaged histogram by its name, or a file. Raises ValueError with the row and the column."""
    known = packaged_histograms()
    is_path = given not in known and (given.endswith(".csv") or "/" in given)
    if not is_path and given not in known:
        raise ValueError(f"unknown histogram '{given}'; there is: {', '.join(known)}, or the path of a .csv file")
    try:
        with (Path(given) if is_path else _folder() / f"{given}.csv").open("r", encoding="utf-8") as file:
            return _parsed(file, given)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"histogram '{given}' cannot be read: {error}") from error


def _folder() -> Traversable:
    return files("tokenyard_plugins._generated") / "histograms"


def _parsed(file: IO[str], name: str) -> Histogram:
    rows = csv.reader(_lines(file, name))
    header = next(rows, [])
    if header not in _COLUMNS:
        allowed = " or ".join(",".join(columns) for columns in _COLUMNS)
        raise ValueError(f"histogram '{name}', row 1: the columns must be {allowed}, got {','.join(header)[:100]!r}")
    bins = [_bin(row, header, f"histogram '{name}', row {number}") for number, row in enumerate(rows, start=2) if row]
    if not bins:
        raise ValueError(f"histogram '{name}' has no rows")
    lows, highs, counts = zip(*bins, strict=True)
    if not sum(counts):
        raise ValueError(f"histogram '{name}': every count is 0")
    return Histogram(lows, highs, counts)


def _lines(file: IO[str], name: str) -> Iterator[str]:
    for number in range(1, _MOST_BINS + 2):
        line = file.readline(_MOST_CHARACTERS)
        if not line:
            return
        if len(line) == _MOST_CHARACTERS:
            raise ValueError(f"histogram '{name}', row {number} is too long")
        yield line
    if file.readline(1):
        raise ValueError(f"histogram '{name}' has more than {_MOST_BINS} rows; make its bins wider")


def _bin(row: Sequence[str], header: Sequence[str], where: str) -> tuple[int, int, int]:
    """Low, high, count."""
    if len(row) != len(header):
        raise ValueError(f"{where} has {len(row)} fields, and the header has {len(header)}")
    numbers = [_number(text, f"{where}, column {column}") for text, column in zip(row, header, strict=True)]
    low, high, count = numbers[0], numbers[-2], numbers[-1]
    if not 1 <= low <= high <= MOST_TOKENS:
        raise ValueError(f"{where}: a length is from 1 to {MOST_TOKENS}, and low at most high; got {','.join(row)}")
    return low, high, count


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ValueError(f"{where}: a whole number from 0 is wanted, got {text[:40]!r}")
    return int(text)
