"""EventParser: the data of server-sent events, from bytes that come in any pieces."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 2**20


class EventParser:
    """Keeps what is not a whole event yet. Lines end with LF or CRLF; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece. Raises ValueError for an event over MAX_EVENT_BYTES."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data, self._size = [], 0
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line)
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found
