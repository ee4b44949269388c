"""The parts of OpenAI's stream chunks that a client looks at."""

from __future__ import annotations

from typing import Annotated

import msgspec


class Delta(msgspec.Struct):
    """What a chat chunk adds."""

    content: str | None = None


class Choice(msgspec.Struct):
    """One choice in a chunk: of a completion (`text`) or of a chat (`delta`)."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    @property
    def added(self) -> str:
        """Text that came with it, possibly none."""
        return self.text or (self.delta.content if self.delta is not None else None) or ""


Tokens = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Usage(msgspec.Struct):
    """Tokens, as the server counts them."""

    prompt_tokens: Tokens = 0
    completion_tokens: Tokens = 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""A chunk's JSON. Raises msgspec.DecodeError, which is a ValueError."""
