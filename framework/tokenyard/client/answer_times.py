"""AnswerTimes: when the chunks of an answer came."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.client.chunks import Chunk, Usage


@dataclass(slots=True, kw_only=True)
class AnswerTimes:
    """What a client has heard of one request. Times are of the client's clock, in seconds."""

    token_times: list[float] = field(default_factory=list)  # of each chunk with text, or with token ids
    last: float | None = None  # of the last chunk that has a choice
    ended: float | None = None
    usage: Usage | None = None
    num_told_tokens: int | None = None  # token ids in the chunks, where they tell them
    num_chunks: int = 0
    error: str | None = None

    @property
    def output_len(self) -> int:
        """Tokens generated, by the server's count; where it does not count, chunks with text."""
        return len(self.token_times) if self.usage is None else self.usage.completion_tokens

    def take(self, chunk: Chunk, now: float) -> None:
        """Note a chunk."""
        self.num_chunks += 1
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            self.last = now
            if choice.token_ids is not None:
                self.num_told_tokens = (self.num_told_tokens or 0) + len(choice.token_ids)
            if choice.added or choice.token_ids:
                self.token_times.append(now)

    def end(self, now: float) -> None:
        """The stream has ended well. An answer without any text began with its end."""
        self.ended = now
        if self.last is None:
            self.error = "the answer had no choice"
        elif not self.token_times:
            self.token_times.append(self.last)
