"""A request table as CSV: one row a request, in order of arrival; the same run gives the same bytes."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.records import REQUEST_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from tokenyard.experiments.records import RequestTable

_PIECE = 4096  # rows that are text at a time


def write_requests(table: RequestTable, path: Path) -> None:
    """Times in seconds, as short as they can be read back exactly; a time that never came is empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(REQUEST_COLUMNS)
        for start in range(0, len(table), _PIECE):
            writer.writerows(_rows(table, slice(start, start + _PIECE)))


def _rows(table: RequestTable, part: slice) -> Iterator[tuple[object, ...]]:
    return zip(
        table.id[part].tolist(),
        ["" if number < 0 else table.clients[number] for number in table.client[part].tolist()],
        _times(table.arrival[part]),
        _times(table.first_scheduled[part]),
        _times(table.first_token[part]),
        _times(table.finish[part]),
        table.prompt[part].tolist(),
        table.output[part].tolist(),
        table.cached[part].tolist(),
        table.preemptions[part].tolist(),
        table.recomputed[part].tolist(),
        strict=True,
    )


def _times(times: NDArray[np.float64]) -> list[str]:
    return ["" if time != time else repr(time) for time in times.tolist()]
