"""TraceFile: a new file that only its owner can read, written in large pieces."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from tokenyard.errors import ConfigError

_BUFFERED = 1 << 16  # bytes that wait for the next write at most


class _Pieces:
    """What is not written yet, and where it goes; a file that nobody closes is closed by this at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._pieces: list[bytes] = []
        self.num_bytes = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.num_bytes += len(piece)

    def write(self) -> None:
        pieces, self._pieces, self.num_bytes = self._pieces, [], 0
        data = memoryview(b"".join(pieces))
        while data and self._descriptor is not None:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def finish(self) -> None:
        try:
            self.write()
        finally:
            self.close()


class TraceFile:
    """Its methods raise OSError where the disk does not take what they write; then it had better be abandoned."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when there is such a file, or none can be made."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
        except FileExistsError:
            raise exists_already(path) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"the trace file {path} cannot be made: {error}") from error
        self.path = path
        self._pieces = _Pieces(descriptor)
        self._finish = weakref.finalize(self, self._pieces.finish)  # also at the interpreter's end

    def write(self, piece: bytes) -> None:
        """Add to the end, soon."""
        self._pieces.add(piece)
        if self._pieces.num_bytes >= _BUFFERED:
            self._pieces.write()

    def flush(self) -> None:
        """Add what waits now."""
        if self._pieces.num_bytes:
            self._pieces.write()

    def close(self) -> None:
        """Write the rest, and close; a second call does nothing."""
        self._finish()

    def abandon(self) -> None:
        """Close without another try to write."""
        self._finish.detach()
        self._pieces.close()


def exists_already(path: Path) -> ConfigError:
    """The error for a file that is there: a trace never overwrites one."""
    return ConfigError(f"the trace file {path} exists already; give another name, or remove it")
