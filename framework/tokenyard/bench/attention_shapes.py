"""What `tokenyard bench attention` attends over: decode and prefill shapes, and what each reads and computes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenyard.errors import ConfigError

_DECODE = re.compile(r"(\d{1,7})x(\d{1,7})", re.ASCII)
_PREFILL = re.compile(r"(?:(\d{1,7})x)?(\d{1,7})\+(\d{1,7})", re.ASCII)
MAX_TOKENS = 2**24  # K/V rows of a layer


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """So many sequences with `query_len` rows each, which are the last of `context_len` tokens."""

    num_sequences: int
    query_len: int
    context_len: int

    def __str__(self) -> str:
        if self.query_len == 1:
            return f"{self.num_sequences}x{self.context_len}"
        many = f"{self.num_sequences}x" if self.num_sequences > 1 else ""
        return f"{many}{self.query_len}+{self.context_len - self.query_len}"

    @property
    def num_tokens(self) -> int:
        """Query rows of all sequences."""
        return self.num_sequences * self.query_len

    def num_read(self, window: int | None) -> int:
        """K/V rows that a layer must read, of all sequences."""
        first_row_starts = 0 if window is None else max(0, self.context_len - self.query_len - window + 1)
        return self.num_sequences * (self.context_len - first_row_starts)

    def num_pairs(self, window: int | None) -> int:
        """Pairs of a query row and a K/V row that it sees, of all sequences."""
        positions = range(self.context_len - self.query_len, self.context_len)
        seen = (position + 1 if window is None else min(position + 1, window) for position in positions)
        return self.num_sequences * sum(seen)


def parse_attention_shape(text: object) -> AttentionShape:
    """`32x512`: 32 sequences decode at 512 tokens. `256+256` or `4x256+256`: rows of a prompt behind cached tokens."""
    shape = _parsed(text) if isinstance(text, str) else None
    if shape is None:
        raise ConfigError(
            f"bench.shapes: {text!r} is no shape; give SEQUENCESxCONTEXT such as 32x512 to decode, or QUERY+CACHED "
            "such as 256+256 to prefill, with numbers above 0 (CACHED may be 0)"
        )
    if (num_tokens := shape.num_sequences * shape.context_len) > MAX_TOKENS:
        raise ConfigError(f"bench.shapes: {text} has {num_tokens} tokens of K/V; at most {MAX_TOKENS} are measured")
    return shape


def _parsed(text: str) -> AttentionShape | None:
    if match := _DECODE.fullmatch(text):
        shape = AttentionShape(int(match[1]), 1, int(match[2]))
    elif match := _PREFILL.fullmatch(text):
        num_query = int(match[2])
        shape = AttentionShape(int(match[1] or 1), num_query, num_query + int(match[3]))
    else:
        return None
    return shape if min(shape.num_sequences, shape.query_len, shape.context_len) >= 1 else None
