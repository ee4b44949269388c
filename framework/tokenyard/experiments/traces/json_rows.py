"""Rows of a file with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from tokenyard.errors import did_you_mean

if TYPE_CHECKING:
    from tokenyard.experiments.traces.lines import TraceLines


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice}' is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)


def json_rows(lines: TraceLines, required: Sequence[str]) -> Iterator[dict[str, object]]:
    """Raises ConfigError for a line that is no object, and for one that lacks a key or has one twice."""
    for line in lines:
        lines.row += 1
        row = json_object(lines, line)
        for name in required:
            if name not in row:
                lines.wrong(name, None, f"given; the row has {', '.join(row) or 'nothing'}", did_you_mean(name, row))
        yield row


def json_object(lines: TraceLines, text: str) -> dict[str, object]:
    """One object. Raises ConfigError."""
    try:
        row = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        lines.malformed(f"is not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        lines.malformed(f"is not valid: {error}")
    except RecursionError:
        lines.malformed("is not valid: it is nested too deeply")
    if not isinstance(row, dict):
        lines.malformed("is not a JSON object, such as {...}")
    return row
