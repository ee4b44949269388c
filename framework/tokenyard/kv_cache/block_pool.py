"""BlockPool: reference counts, the free list and the map from block hashes to blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Block 0 is never handed out: unused block-table entries point to it, so that every entry is a legal index."""


class BlockPool:
    """`num_blocks` usable blocks with ids 1 .. num_blocks.

    A block is *referenced* (its count says by how many tables) or *free*. A free block keeps its hash, and so its
    content, until it is handed out again: free blocks are reused in the order in which they became free (LRU).
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        # Several blocks may hold one content: two requests can compute the same prefix at the same time.
        self._blocks_by_hash: dict[bytes, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def block_hash(self, block_id: int) -> bytes | None:
        return self._hashes[block_id]

    def cached_hashes(self) -> frozenset[bytes]:
        """Hashes whose content some block holds."""
        return frozenset(self._blocks_by_hash)

    def find(self, block_hash: bytes) -> int | None:
        """A block with this content, or None."""
        blocks = self._blocks_by_hash.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def take(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that hold cached content."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def pop(self, count: int) -> list[int]:
        """Hand out the `count` blocks that have been free longest, each with one reference and no content.

        The caller has checked `num_free`; too few is a bug and raises RuntimeError.
        """
        if count > len(self._free):
            raise RuntimeError(f"no free blocks: {count} asked for, {len(self._free)} free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._forget(block_id)
            self._ref_counts[block_id] = 1
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a table, last one first: a prefix is evicted from its end."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} is released more often than it was taken")
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Say what a full block holds, so that `find` can return it."""
        if self._hashes[block_id] is not None:
            raise RuntimeError(f"block {block_id} has a hash already")
        self._hashes[block_id] = block_hash
        self._blocks_by_hash.setdefault(block_hash, {})[block_id] = None

    def clear(self) -> None:
        """Forget the content of every block."""
        for block_id in range(1, self.num_blocks + 1):
            self._hashes[block_id] = None
        self._blocks_by_hash.clear()

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is None:
            return
        self._hashes[block_id] = None
        blocks = self._blocks_by_hash[block_hash]
        del blocks[block_id]
        if not blocks:
            del self._blocks_by_hash[block_hash]
