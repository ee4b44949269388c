"""Files of ServeGen: what a client sends over time, as rates and distributions."""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import ConfigError
from tokenyard.experiments.traces.json_rows import json_object
from tokenyard.experiments.traces.lines import TraceLines, open_bytes
from tokenyard.experiments.traces.values import MAX_SECONDS, MAX_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenyard.arrays import FloatArray

TRACE_FILE = re.compile(r"(?P<client>.+)-trace(?P<rest>\w*)\.csv(\.gz)?", re.ASCII)
MAX_CLIENTS, MAX_WINDOWS, MAX_LENGTHS = 10_000, 100_000, 1_000_000
_MAX_DATASET_BYTES = 2**26
_MAX_RATE = 1e6  # requests a second
_COLUMNS = ("start", "rate", "cv", "pattern", "shape", "scale")
_PAIR = re.compile(r"\s*(\d{1,10})\s*:\s*([0-9.eE+-]{1,32})\s*")


@dataclass(frozen=True, slots=True)
class RateWindow:
    """A stretch of time with one arrival process; rate 0 = nothing comes."""

    start: float  # seconds
    rate: float  # requests a second
    pattern: str  # "Gamma" or "Weibull", of the times between requests; "" where nothing comes
    shape: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths."""

    values: NDArray[np.int64]
    cumulative: FloatArray  # up to 1


@dataclass(frozen=True, slots=True)
class LengthWindow:
    """Lengths from a time on."""

    start: float
    prompt: Lengths
    output: Lengths


@dataclass(frozen=True, slots=True)
class ServeGenClient:
    """One client of a ServeGen pool; windows are in order of time, and there is at least one of each kind."""

    name: str
    rates: Sequence[RateWindow]
    lengths: Sequence[LengthWindow]

    def lengths_at(self, time: float) -> LengthWindow:
        """The window that holds `time`, else the nearest one before it, else the first."""
        return self.lengths[max(0, bisect_right(self.lengths, time, key=lambda window: window.start) - 1)]


def read_clients(path: Path) -> list[ServeGenClient]:
    """All clients of a folder, in order of name, or that of one pair of files. Raises ConfigError."""
    if path.is_dir():
        traces = sorted(file for file in path.iterdir() if TRACE_FILE.fullmatch(file.name))
        if not traces:
            raise ConfigError(f"{path}: no file CLIENT-trace.csv in this folder, with CLIENT-dataset.json beside it")
        if len(traces) > MAX_CLIENTS:
            raise ConfigError(f"{path}: {len(traces)} clients; at most {MAX_CLIENTS} can be run together")
    else:
        traces = [path]
    return [_read_client(trace) for trace in traces]


def _read_client(trace: Path) -> ServeGenClient:
    match = TRACE_FILE.fullmatch(trace.name)
    if match is None:
        raise ConfigError(f"{trace}: a file of format servegen is called CLIENT-trace.csv, with CLIENT-dataset.json")
    stem = f"{match['client']}-dataset{match['rest']}.json"
    dataset = next((found for name in (stem, f"{stem}.gz") if (found := trace.parent / name).is_file()), None)
    if dataset is None:
        raise ConfigError(f"{trace}: the lengths of this client are missing: no {stem} beside it")
    return ServeGenClient(match["client"], _read_rates(TraceLines(trace)), _read_lengths(TraceLines(dataset)))


def _read_rates(lines: TraceLines) -> list[RateWindow]:
    windows: list[RateWindow] = []
    for cells in _cells(lines):
        start, rate, _, shape, _ = (
            _number(lines, column, cell) for column, cell in zip(_COLUMNS, cells, strict=True) if column != "pattern"
        )
        if windows and start <= windows[-1].start:
            lines.wrong("start", cells[0], f"in order of time, so above {windows[-1].start}")
        if start > MAX_SECONDS or rate > _MAX_RATE:
            lines.wrong("rate" if rate > _MAX_RATE else "start", cells[:2], "seconds and requests a second")
        pattern = cells[3].strip()
        if rate > 0 and (pattern not in ("Gamma", "Weibull") or not 1e-3 <= shape <= 1e6):
            lines.wrong("pattern", cells[3:5], "Gamma or Weibull, with a shape from 0.001 to 1e6")
        windows.append(RateWindow(start, rate, pattern, shape))
        if len(windows) > MAX_WINDOWS:
            lines.malformed(f"is one of more than {MAX_WINDOWS} windows; cut the file")
    if not windows:
        raise ConfigError(f"{lines.path}: the file is empty; a row has the columns {', '.join(_COLUMNS)}")
    return windows


def _cells(lines: TraceLines) -> Iterator[list[str]]:
    try:
        for cells in csv.reader(iter(lines), strict=True):
            lines.row += 1
            if len(cells) != len(_COLUMNS):
                lines.malformed(f"has {len(cells)} columns; there are {len(_COLUMNS)}: {', '.join(_COLUMNS)}")
            yield cells
    except csv.Error as error:
        lines.malformed(f"is not CSV: {error}")


def _number(lines: TraceLines, column: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        lines.wrong(column, cell, "a number of at least 0")
    return value


def _read_lengths(lines: TraceLines) -> list[LengthWindow]:
    with open_bytes(lines.path) as stream:
        content = stream.read(_MAX_DATASET_BYTES + 1)
    if len(content) > _MAX_DATASET_BYTES:
        raise ConfigError(f"{lines.path}: larger than {_MAX_DATASET_BYTES} bytes; the lengths of a client are small")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{lines.path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error
    lines.row = lines.number = 1
    windows = []
    for start, row in json_object(lines, text).items():
        if not isinstance(row, dict):
            lines.wrong(start, row, "an object with input_tokens and output_tokens")
        prompt, output = (_distribution(lines, name, row.get(name)) for name in ("input_tokens", "output_tokens"))
        if prompt is not None and output is not None:  # windows in which nothing came are empty
            windows.append(LengthWindow(_number(lines, "start", start), prompt, output))
        lines.row += 1
    if not windows:
        raise ConfigError(f"{lines.path}: no window has lengths")
    return sorted(windows, key=lambda window: window.start)


def _distribution(lines: TraceLines, column: str, text: object) -> Lengths | None:
    """`{LENGTH: PROBABILITY, ...}`, as text, read as data. None where it is empty.

    Length 0 stands for requests that failed; it is left out.
    """
    allowed = "text such as '{12: 0.25, 13: 0.75}'"
    if not isinstance(text, str) or not (inside := text.strip()).startswith("{") or not inside.endswith("}"):
        lines.wrong(column, text, allowed)
    inside = inside[1:-1].strip()
    if not inside:
        return None
    pairs = [_PAIR.fullmatch(item) for item in inside.split(",")]
    if len(pairs) > MAX_LENGTHS or any(pair is None for pair in pairs):
        lines.wrong(column, text, allowed)
    values = np.array([int(pair[1]) for pair in pairs if pair], dtype=np.int64)
    weights = np.array([_number(lines, column, pair[2]) for pair in pairs if pair])
    weights[values == 0] = 0.0
    total = weights.sum()
    if values.max() > MAX_TOKENS or not 0 < total < math.inf:
        lines.wrong(column, text, f"lengths from 1 to {MAX_TOKENS} with probabilities, of which one is above 0")
    return Lengths(values, np.cumsum(weights) / total)
