"""TraceLines: a text file of any length, plain or gzipped, line by line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from tokenyard.errors import ConfigError

MAX_LINE_BYTES = 2**22  # a row with the hashes of a prompt of a million tokens in small blocks
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_MOST_SHOWN = 80  # characters of a value in a message


class TraceLines:
    """Iterating reads the file once, from its beginning, and yields lines without their ends; blank ones are left out.

    `number` is that of the line that was read last, `row` that of the row: whoever reads counts rows, so that a header
    is none. Both count from 1. Everything that cannot be read raises ConfigError with the file's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self.row = 0

    def __iter__(self) -> Iterator[str]:
        self.number = self.row = 0
        with open_bytes(self.path) as stream, told(self.path):
            while line := stream.readline(MAX_LINE_BYTES + 1):
                self.number += 1
                if self.number == 1:
                    line = line.removeprefix(_BOM)
                if text := self._text(line).rstrip():
                    yield text

    def wrong(self, column: str, value: object, allowed: str, remedy: str = "") -> NoReturn:
        """A value that does not hold: where it stands, what it is, what would be right."""
        raise ConfigError(
            f"{self.path}: row {self.row} (line {self.number}), column '{column}': got {shown(value)}; it must be "
            f"{allowed}{remedy}"
        )

    def malformed(self, problem: str) -> NoReturn:
        """A line that has no columns to speak of."""
        raise ConfigError(f"{self.path}: row {self.row} (line {self.number}): {problem}")

    def _text(self, line: bytes) -> str:
        if len(line) > MAX_LINE_BYTES:
            self._refuse(f"is longer than {MAX_LINE_BYTES} bytes")
        if b"\0" in line:
            self._refuse("has a zero byte: this is not a text file")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            self._refuse(f"is not UTF-8 text: {error.reason} at byte {error.start}")

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self.path}: line {self.number} {problem}; a trace is lines of text, plain or gzipped")


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The content of a file, unpacked if it is gzipped, whatever it is called."""
    with told(path), path.open("rb") as packed:
        is_packed = packed.peek(2)[:2] == _GZIP
        with gzip.GzipFile(fileobj=packed) if is_packed else packed as stream:
            yield stream  # type: ignore[misc]  # a GzipFile reads as a file does


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system or gzip says of a file, as one line with its name."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: the gzipped file is damaged or cut off ({error}); fetch it again") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; workload.path is a trace, from the folder of the command") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error


def shown(value: object) -> str:
    """A value for a message, cut to a length that fits a line."""
    if value is None:
        return "nothing"
    try:
        text = repr(value)
    except ValueError:  # a whole number of too many digits
        return f"a {type(value).__name__} of very many digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
