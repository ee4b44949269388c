"""Values of a trace's columns, checked: cells of CSV files, members of JSON objects."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenyard.interfaces.workload import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.experiments.traces.lines import TraceLines

MAX_TOKENS = 2**31 - 1  # results keep lengths as 32-bit numbers
MAX_SECONDS = 1e10  # three centuries: what is beyond is a time in another unit
MAX_HASH = 2**63 - 1
_MAX_TEXT = 256  # characters, as in scheduling hints of a client
_TOKENS = f"a whole number of tokens from 0 to {MAX_TOKENS}"
_HINT = "; are these milliseconds?"


def token_cell(lines: TraceLines, column: str, cell: str) -> int:
    """A length of a CSV file."""
    text = cell.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or (tokens := int(text)) > MAX_TOKENS:
        lines.wrong(column, cell, _TOKENS)
    return tokens


def token_value(lines: TraceLines, column: str, value: object) -> int:
    """A length of a JSON object."""
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        lines.wrong(column, value, _TOKENS)
    return value


def second_cell(lines: TraceLines, column: str, cell: str) -> float:
    """A time of a CSV file, in seconds."""
    try:
        seconds = float(cell)
    except ValueError:
        seconds = math.nan
    return _checked_seconds(lines, column, cell, seconds)


def second_value(lines: TraceLines, column: str, value: object, *, per_second: int = 1) -> float:
    """A time of a JSON object, given in so many parts of a second."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 2**62:
        seconds = math.nan
    else:
        seconds = value / per_second
    return _checked_seconds(lines, column, value, seconds)


def _checked_seconds(lines: TraceLines, column: str, given: object, seconds: float) -> float:
    if not 0 <= seconds <= MAX_SECONDS:  # also refuses NaN
        hint = _HINT if seconds > MAX_SECONDS else ""
        lines.wrong(column, given, f"a time of at least 0 and at most {MAX_SECONDS:g} s{hint}")
    return seconds


def optional_text(lines: TraceLines, column: str, value: object) -> str | None:
    """A name; None where there is none."""
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT:
        lines.wrong(column, value, f"text of 1 to {_MAX_TEXT} characters")
    return value


def hashed_content(
    lines: TraceLines, column: str, value: object, num_tokens: int, tokens_per_hash: int
) -> list[Segment]:
    """The prompt that a list of ids stands for: each is `tokens_per_hash` tokens, the last one what is left."""
    wanted = -(-num_tokens // tokens_per_hash)
    if not isinstance(value, list) or len(value) != wanted:
        given = f"{len(value)} ids" if isinstance(value, list) else value
        allowed = f"a list of {wanted} ids: {num_tokens} prompt tokens at {tokens_per_hash} a hash"
        lines.wrong(column, given, allowed, "; see workload.tokens_per_hash")
    for item in value:
        if type(item) is not int or not 0 <= item <= MAX_HASH:
            lines.wrong(column, item, "a list of whole numbers from 0 to 2**63 - 1")
    return _segments(value, num_tokens, tokens_per_hash)


def _segments(ids: Sequence[int], num_tokens: int, tokens_per_hash: int) -> list[Segment]:
    segments = [Segment(content, tokens_per_hash) for content in ids]
    if segments:
        segments[-1] = Segment(ids[-1], num_tokens - tokens_per_hash * (len(ids) - 1))
    return segments
