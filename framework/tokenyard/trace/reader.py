"""Reading a trace file. What is no trace is told in one line; the last line of a crash may be cut."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

from tokenyard.errors import UserError
from tokenyard.trace.lines import decode_line
from tokenyard.trace.records import FORMAT, VERSION, Closed, Header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from tokenyard.trace.records import Record

_LONGEST = 1 << 28  # bytes of a line: no prompt is that long
_UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError, MemoryError)


class TraceReader:
    """`header`, then `records` once. Raises UserError for a file that is no trace, or of another version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line = 0  # number of the line that was read last, from 1
        self.is_complete = False  # whether the end of the trace was read
        self.is_cut = False  # whether the last line is only the beginning of one
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise UserError(f"the trace {path} cannot be read: it is no regular file; give one of trace.path")
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise UserError(f"the trace {path} cannot be read: {error.strerror or error}") from error
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def records(self) -> Iterator[Record]:
        """Every record in order; stops before a last line that is cut. Raises UserError where one is broken."""
        while (line := self._next()) is not None:
            try:
                record = decode_line(line)
            except _UNREADABLE as error:
                if not line.endswith(b"\n"):
                    self.is_cut = True
                    return
                raise self._broken(str(error)) from error
            if isinstance(record, Header):
                raise self._broken("a second header")
            self.is_complete = isinstance(record, Closed)
            yield record

    def notes(self) -> list[str]:
        """What somebody who reads results should know of the file."""
        if self.is_cut:
            return [f"{self.path} ends in the middle of line {self.line}: its engine was killed; that line is left out"]
        if not self.is_complete:
            return [f"{self.path} has no end: its engine was killed, or still runs"]
        return []

    def _next(self) -> bytes | None:
        line = self._file.readline(_LONGEST)
        if not line:
            return None
        self.line += 1
        if len(line) == _LONGEST:
            raise self._broken("the line is too long")
        return line

    def _read_header(self) -> Header:
        line = self._next()
        try:
            values = json.loads(line or b"")
        except _UNREADABLE as error:
            raise self._no_trace() from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise self._no_trace()
        if values.get("version") != VERSION:
            raise UserError(
                f"{self.path} is a trace of format version {values.get('version')!r}, written by Tokenyard "
                f"{values.get('tokenyard')!r}; this one reads version {VERSION}: use that Tokenyard"
            )
        try:
            header = decode_line(line or b"")
        except _UNREADABLE as error:
            raise self._broken(str(error)) from error
        if not isinstance(header, Header):
            raise self._no_trace()
        return header

    def _no_trace(self) -> UserError:
        return UserError(f"{self.path} is no trace: its first line is no header; give a file that trace.path wrote")

    def _broken(self, why: str) -> UserError:
        return UserError(f"{self.path}, line {self.line}: no record of a trace: {why:.200}")
