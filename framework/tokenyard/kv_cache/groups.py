"""KVGroup: what of a prefix the layers of one KV group need, and where the cache has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tokenyard.kv_cache.block_pool import NULL_BLOCK

Find: TypeAlias = Callable[[bytes], int | None]

_DIGEST_BYTES = 32


class KVGroup:
    """Layers with one block table. With a sliding window of W tokens, the query at position p reads p-W+1 .. p.

    At a block edge, later queries reach back W - 1 tokens:

        |.......|.......|.......|.......|  next query
         passed |<-- num_reached blocks ->|
    """

    __slots__ = ("_key_suffix", "index", "num_reached", "window")

    def __init__(self, index: int, window: int | None, block_size: int) -> None:
        self.index = index
        self.window = window
        # Never 0: a hit rests on something that is cached, even when each token reads only itself.
        self.num_reached = None if window is None else max(1, -(-(window - 1) // block_size))
        self._key_suffix = b"" if index == 0 else index.to_bytes(2, "little")

    def keys(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Names of this group's blocks in the pool: a block of one group never serves another."""
        if not self._key_suffix:
            return digests
        return [digest + self._key_suffix for digest in digests]

    def key(self, digest: bytes) -> bytes:
        """The name of one of them."""
        return digest + self._key_suffix

    def longest_hit(self, keys: Sequence[bytes], limit: int, find: Find) -> int:
        """How many of the first `limit` blocks could be skipped, as far as this group is concerned."""
        if self.num_reached is not None:
            return self._longest_window_hit(keys, limit, self.num_reached, find)
        for index in range(limit):
            if find(keys[index]) is None:
                return index
        return limit

    def hit_table(self, keys: Sequence[bytes], find: Find) -> list[int] | None:
        """The block table behind a hit of all these blocks; None when one is not there."""
        first = 0 if self.num_reached is None else max(0, len(keys) - self.num_reached)
        table = [NULL_BLOCK] * first
        for index in range(first, len(keys)):
            block_id = find(keys[index])
            if block_id is None:
                return None
            table.append(block_id)
        return table

    def num_passed(self, num_computed_tokens: int, block_size: int) -> int:
        """Blocks at the start that no query at position `num_computed_tokens` or later reads."""
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.window + 1) // block_size

    def _longest_window_hit(self, keys: Sequence[bytes], limit: int, num_reached: int, find: Find) -> int:
        run = 0  # cached blocks from `index` on, without a gap
        for index in range(limit - 1, -1, -1):
            if find(keys[index]) is None:
                run = 0
                continue
            run += 1
            if run == num_reached:
                return index + run
        return run  # shorter than the window, but from the first block on


def split_key(key: bytes) -> tuple[bytes, int]:
    """The digest and the group's index that a name in the pool consists of."""
    return key[:_DIGEST_BYTES], int.from_bytes(key[_DIGEST_BYTES:], "little")


def longest_hit(groups: Sequence[KVGroup], digests: Sequence[bytes], find: Find) -> int:
    """The most blocks at the start that every group can skip."""
    pairs = [(group, group.keys(digests)) for group in groups]
    length, before = len(digests), None
    # What one group rejects may leave another with less than its window: until all agree.
    while length != before:
        before = length
        for group, keys in pairs:
            length = group.longest_hit(keys, length, find)
        if len(pairs) == 1:
            break
    return length


def cached_prefix(digests: Sequence[bytes], find: Find) -> list[int]:
    """The blocks that hold the longest cached prefix: the hit of a single group without a window."""
    table: list[int] = []
    for digest in digests:
        block_id = find(digest)
        if block_id is None:
            break
        table.append(block_id)
    return table
