"""The tables of a run as CSV, row by row, such that every number can be read back exactly."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tokenyard.errors import UserError
from tokenyard.experiments.columns import Names
from tokenyard.experiments.records import (
    REQUEST_COLUMNS,
    STEP_COLUMNS,
    RequestStatus,
    RequestTable,
    StepTable,
    TokenGaps,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

ALL_REQUEST_COLUMNS = (*REQUEST_COLUMNS, "session", "priority", "deadline", "status")
GAP_COLUMNS = ("seconds", "count")

_PIECE = 4096  # rows that are text at a time
_NAN = float("nan")

T = TypeVar("T", bound=np.generic)


def write_request_table(table: RequestTable, path: Path, names: Sequence[str] = ALL_REQUEST_COLUMNS) -> None:
    """One row a request, in order of arrival. A time that never came, and a name that there is not, are empty.

    `names`: the columns, in their order.
    """
    columns: dict[str, Callable[[slice], Iterable[object]]] = {
        **{name: _numbers(getattr(table, name)) for name in ALL_REQUEST_COLUMNS if name not in _NAMES},
        "client": _names(table.client, table.clients),
        "session": _names(table.session, table.sessions),
        "status": lambda part: [RequestStatus(one).name.lower() for one in table.status[part].tolist()],
    }
    _write(path, names, columns, len(table))


def read_requests(path: Path) -> RequestTable:
    """Raises UserError for a file that is not such a table, with the row."""
    columns = _read(path, ALL_REQUEST_COLUMNS)
    client, clients = _numbered(columns["client"])
    session, sessions = _numbered(columns["session"])
    read = _Reader(path, columns)
    return RequestTable(
        id=read.column("id", np.int64),
        client=client,
        clients=clients,
        session=session,
        sessions=sessions,
        arrival=read.times("arrival"),
        first_scheduled=read.times("first_scheduled"),
        first_token=read.times("first_token"),
        finish=read.times("finish"),
        prompt=read.column("prompt", np.int32),
        output=read.column("output", np.int32),
        cached=read.column("cached", np.int32),
        preemptions=read.column("preemptions", np.int32),
        recomputed=read.column("recomputed", np.int32),
        priority=read.column("priority", np.int64),
        deadline=read.times("deadline"),
        status=read.converted("status", np.int8, lambda text: RequestStatus[text.upper()]),
    )


def write_steps(table: StepTable, path: Path) -> None:
    """One row a step; `step` counts from 0."""
    columns: dict[str, Callable[[slice], Iterable[object]]] = {
        "step": lambda part: range(*part.indices(len(table))),
        **{name: _numbers(getattr(table, name)) for name in STEP_COLUMNS if name != "step"},
    }
    _write(path, STEP_COLUMNS, columns, len(table))


def read_steps(path: Path) -> StepTable:
    """Raises UserError for a file that is not such a table, with the row."""
    read = _Reader(path, _read(path, STEP_COLUMNS))
    return StepTable(
        start=read.times("start"),
        end=read.times("end"),
        running=read.column("running", np.int32),
        waiting=read.column("waiting", np.int32),
        prefill_tokens=read.column("prefill_tokens", np.int32),
        decode_tokens=read.column("decode_tokens", np.int32),
        used_blocks=read.column("used_blocks", np.int32),
    )


def write_gaps(gaps: TokenGaps, path: Path) -> None:
    """Times between tokens, each with how often it came."""
    _write(path, GAP_COLUMNS, {"seconds": _numbers(gaps.seconds), "count": _numbers(gaps.counts)}, len(gaps.seconds))


def read_gaps(path: Path, relative_error: float) -> TokenGaps:
    """Raises UserError for a file that is not such a table, with the row."""
    read = _Reader(path, _read(path, GAP_COLUMNS))
    return TokenGaps(
        seconds=read.times("seconds"), counts=read.column("count", np.int64), relative_error=relative_error
    )


_NAMES = ("client", "session", "status")


def _numbers(values: NDArray[np.generic]) -> Callable[[slice], Iterable[object]]:
    if values.dtype.kind != "f":
        return lambda part: values[part].tolist()
    return lambda part: ["" if one != one else repr(one) for one in values[part].tolist()]


def _names(numbers: NDArray[np.int32], names: Sequence[str]) -> Callable[[slice], Iterable[object]]:
    return lambda part: ["" if one < 0 else names[one] for one in numbers[part].tolist()]


def _write(
    path: Path, names: Sequence[str], columns: Mapping[str, Callable[[slice], Iterable[object]]], length: int
) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for start in range(0, length, _PIECE):
            part = slice(start, start + _PIECE)
            writer.writerows(zip(*(columns[name](part) for name in names), strict=True))


def _read(path: Path, names: Sequence[str]) -> dict[str, list[str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            if missing := [name for name in names if name not in header]:
                raise UserError(f"{path}: lacks the columns {', '.join(missing)}; it is none of a run, or was changed")
            columns: list[list[str]] = [[] for _ in header]
            for row in rows:
                if len(row) != len(header):
                    raise UserError(f"{path}, line {rows.line_num}: has {len(row)} values for {len(header)} columns")
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; the run is not whole, make it again") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return dict(zip(header, columns, strict=True))


def _numbered(cells: Sequence[str]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    names = Names()
    return np.array([names.number(cell or None) for cell in cells], dtype=np.int32), names.names


class _Reader:
    """Columns of text as arrays; what is none of their type is told with its row."""

    def __init__(self, path: Path, columns: Mapping[str, Sequence[str]]) -> None:
        self._path = path
        self._columns = columns

    def times(self, name: str) -> NDArray[np.float64]:
        return self.converted(name, np.float64, lambda text: float(text) if text else _NAN)

    def column(self, name: str, dtype: type[T]) -> NDArray[T]:
        return self.converted(name, dtype, int)

    def converted(self, name: str, dtype: type[T], convert: Callable[[str], float]) -> NDArray[T]:
        cells = self._columns[name]
        try:
            return np.array([convert(cell) for cell in cells], dtype=dtype)
        except (ValueError, KeyError, OverflowError) as error:
            row, cell = next((row, cell) for row, cell in enumerate(cells) if not _can(convert, cell))
            raise UserError(f"{self._path}, row {row + 1}: {name}={cell!r} is no such value") from error


def _can(convert: Callable[[str], float], cell: str) -> bool:
    try:
        convert(cell)
    except (ValueError, KeyError):
        return False
    return True
