"""BlockMemory: what a K/V cache would hold, as one number a position that stands for all tokens up to it.

A model's K and V at a position depend on every token before it, so two positions may share a block only where these
numbers are equal: what a manager hands out wrongly shows as a number that nobody of this content wrote.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.interfaces.kv_cache import ExtraKey
    from tokenyard.scheduler_output import HostTransfer

NULL_BLOCK = 0

_MODULUS = 2**61 - 1
_FACTOR = 6364136223846793005 % _MODULUS


class TokenChain:
    """A request's tokens, and for each the number that stands for it and everything before it."""

    def __init__(self, root: str = "", extra_keys: Sequence[ExtraKey] = ()) -> None:
        self.tokens: list[int] = []
        self._marks = tuple(extra_keys)
        self._last = zlib.crc32(root.encode()) + 1
        self._digests: LongArray = np.zeros(64, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digests(self) -> LongArray:
        """[len(self)]"""
        return self._digests[: len(self.tokens)]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        needed = len(self.tokens) + len(token_ids)
        if needed > len(self._digests):
            self._digests = np.concatenate([self._digests, np.zeros(needed, dtype=np.int64)])
        for token_id in token_ids:
            position = len(self.tokens)
            self._last = (self._last * _FACTOR + token_id + 1 + self._mark(position)) % _MODULUS
            self._digests[position] = self._last
            self.tokens.append(token_id)

    def _mark(self, position: int) -> int:
        return sum(
            zlib.crc32(f"{extra.key}/{position - extra.start}".encode()) + 1
            for extra in self._marks
            if extra.start <= position < extra.end
        )


class BlockMemory:
    """Blocks of all groups, and those in host memory; one id holds the content of one group at a time."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self._block_size = block_size
        self._content: LongArray = np.zeros((num_blocks + 1, block_size), dtype=np.int64)
        self._host: LongArray = np.zeros((num_host_blocks, block_size), dtype=np.int64)

    def write(self, group: int, table: IntArray, start: int, digests: LongArray) -> None:
        """Fill positions start .. start + len(digests) of a table."""
        positions = np.arange(start, start + len(digests))
        self._content[table[positions // self._block_size], positions % self._block_size] = digests + group

    def transfer(self, transfer: HostTransfer) -> None:
        """Copy blocks to host memory or back."""
        if transfer.to_host:
            self._host[transfer.host_block_ids] = self._content[transfer.block_ids]
        else:
            self._content[transfer.block_ids] = self._host[transfer.host_block_ids]

    def first_wrong(self, group: int, table: IntArray, start: int, digests: LongArray) -> int | None:
        """The first position from `start` on that does not hold its number in `digests` (of the whole sequence)."""
        positions = np.arange(start, len(digests))
        held = self._content[table[positions // self._block_size], positions % self._block_size]
        wrong = np.flatnonzero(held != digests[start:] + group)
        return int(positions[wrong[0]]) if len(wrong) else None
