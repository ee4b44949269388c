"""ChunkFrame: the events of one stream as bytes, out of pieces that are made once."""

from __future__ import annotations

import msgspec

encode = msgspec.json.encode


class ChunkFrame:
    """What all chunks of a stream have in common. A chunk is the frame around its choices, which are JSON already."""

    def __init__(self, *, object_name: str, response_id: str, created: int, model: str) -> None:
        common = {"id": response_id, "object": object_name, "created": created, "model": model}
        self.head = b"data: " + encode(common)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n'

    def event(self, choice: bytes = b"", usage: msgspec.Struct | None = None) -> bytes:
        """One event; without a choice its `choices` are empty."""
        if usage is None:
            return self.head + choice + self.tail
        return b"".join((self.head, choice, b'],"usage":', encode(usage), b"}\n\n"))
