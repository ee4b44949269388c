"""Where records go. One that fails is switched off, with one warning; the engine never notices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from tokenyard.trace.lines import encode_line
from tokenyard.trace.records import Header

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.trace.file import TraceFile
    from tokenyard.trace.records import AnyLine, Record

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the records of one scheduler, in order. Any method may raise: then none is called again but `abandon`."""

    @property
    def name(self) -> str:
        """For messages: the file."""

    def take(self, record: AnyLine) -> None:
        """The header first, then each record."""

    def flush(self) -> None:
        """Nothing more will come for a while."""

    def close(self) -> None:
        """Nothing more will come."""

    def abandon(self) -> None:
        """Give up, having failed; never raises."""


class JsonLines:
    """A record a line."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.name = str(file.path)

    def take(self, record: AnyLine) -> None:
        self._file.write(encode_line(record))
        if isinstance(record, Header):
            self._file.flush()  # who looks finds the beginning at once, and a full disk is told at launch

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        self._file.abandon()


class Sinks:
    """Several sinks, each of which may fail on its own."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def begin(self, header: Header) -> None:
        """The first line; here a failure is the caller's, who has started nothing yet."""
        for sink in self._sinks:
            sink.take(header)

    def take(self, record: Record) -> None:
        self._each(lambda sink: sink.take(record))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def fail(self, error: Exception) -> None:
        """What should be recorded cannot be: every sink ends here."""
        for sink in tuple(self._sinks):
            self._switch_off(sink, error)

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in tuple(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._switch_off(sink, error)

    def _switch_off(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        sink.abandon()
        logger.warning("the trace %s ends here, the engine goes on: %s: %s", sink.name, type(error).__name__, error)
