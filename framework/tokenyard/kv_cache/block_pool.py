"""BlockPool: reference counts, the free list and the map from content to blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from tokenyard.kv_cache.eviction import LRUEviction, MakeEviction
from tokenyard.kv_cache.retention import NORMAL, RetentionEviction

if TYPE_CHECKING:
    from tokenyard.interfaces.eviction import EvictionRule

NULL_BLOCK = 0
"""Block 0 is never handed out: unused block-table entries point to it, so that every entry is a legal index."""


class BlockPool:
    """`num_blocks` usable blocks with ids 1 .. num_blocks.

    A block is *referenced* (its count says by how many table entries) or *free*. A free block keeps its hash, and so
    its content, until it is handed out again; the eviction rule that `make_eviction` makes says which one that is.
    `on_removed` is called with a hash when its last block is handed out to hold something else. Of content whose
    retention level is above normal, at most `retention_share` of the blocks is kept before other content.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        make_eviction: MakeEviction = LRUEviction,
        retention_share: float = 0.5,
        on_removed: Callable[[bytes], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._on_removed = on_removed
        self._make_eviction = make_eviction
        self._most_high = int(retention_share * num_blocks)
        self._free: EvictionRule = make_eviction(num_blocks)
        self._levels: RetentionEviction | None = None  # `_free`, from the first content on that is not of level NORMAL
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._blocks: dict[bytes, int] = {}
        self.find: Callable[[bytes], int | None] = self._blocks.get
        """A block with this content, or None. Bound once: a look-up asks for every block of a prompt."""
        # Several blocks may hold one content: two requests can compute the same prefix at the same time.
        self._duplicates: dict[bytes, list[int]] = {}  # those that are not in _blocks
        self.version = 0  # while it stands still, `find` answers as before

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
        return frozenset(self._blocks)

    def find_all(self, block_hash: bytes) -> list[int]:
        """Every block with this content."""
        block_id = self._blocks.get(block_hash)
        return [] if block_id is None else [block_id, *self._duplicates.get(block_hash, ())]

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody references."""
        counts = self._ref_counts
        return [counts[block_id] for block_id in block_ids].count(0)

    def num_exclusive(self, block_ids: Iterable[int]) -> int:
        """How many of these have one reference."""
        return list(map(self._ref_counts.__getitem__, block_ids)).count(1)

    def take(self, block_ids: Sequence[int], level: int = NORMAL) -> int:
        """Add a reference, of a request with this retention level, to blocks that hold cached content.

        Returns the level that what the request publishes can have.
        """
        counts = self._ref_counts
        for block_id in block_ids:
            if counts[block_id] == 0:
                self._free.remove(block_id)
            counts[block_id] += 1
        levels = self._levels_for(level)
        if levels is not None:
            return levels.hit(block_ids, level)
        self._free.on_hit(block_ids)
        return NORMAL

    def pop(self, count: int) -> list[int]:
        """Hand out the `count` blocks that the eviction rule chooses, each with one reference and no content.

        The caller has checked `num_free`; too few is a bug and raises RuntimeError.
        """
        block_ids = self._free.pop(count)
        counts, hashes = self._ref_counts, self._hashes
        for block_id in block_ids:
            if hashes[block_id] is not None:
                self._forget(block_id)
            counts[block_id] = 1
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each; of those that become free, the first is evicted first."""
        counts, freed = self._ref_counts, []
        for block_id in block_ids:
            count = counts[block_id]
            if count == 1:
                counts[block_id] = 0
                freed.append(block_id)
            elif count:
                counts[block_id] = count - 1
            else:
                raise RuntimeError(f"block {block_id} is released more often than it was taken")
        self._free.append(freed)

    def publish(self, block_ids: Sequence[int], block_hashes: Sequence[bytes], level: int = NORMAL) -> int:
        """Say what full blocks hold, all written at once and in the order of their tokens, so that `find` knows.

        Returns the retention level that the last one has, and so what comes after it can have.
        """
        levels = self._levels_for(level)
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if self._hashes[block_id] is not None:
                raise RuntimeError(f"block {block_id} has a hash already")
            if not self._ref_counts[block_id]:
                raise RuntimeError(f"block {block_id} is free: nobody can have written to it")
            self._hashes[block_id] = block_hash
            if block_hash in self._blocks:
                self._duplicates.setdefault(block_hash, []).append(block_id)
            else:
                self._blocks[block_hash] = block_id
        self.version += 1
        if levels is not None:
            return levels.write(block_ids, level)
        self._free.on_written(block_ids)
        return NORMAL

    def clear(self) -> bool:
        """Forget the content of every block; returns whether there was any."""
        had_content = bool(self._blocks)
        self._hashes = [None] * len(self._hashes)
        self._blocks.clear()
        self._duplicates.clear()
        self.version += 1
        self._free.on_cleared()
        return had_content

    def _levels_for(self, level: int) -> RetentionEviction | None:
        """What knows levels, once anybody had another one than NORMAL: until then nobody pays for them."""
        if self._levels is None and level != NORMAL:
            cached = [block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None]
            self._levels = RetentionEviction(
                self.num_blocks, self._make_eviction, self._free, cached, most_high=self._most_high
            )
            self._free = self._levels
        return self._levels

    def _forget(self, block_id: int) -> None:
        block_hash, self._hashes[block_id] = self._hashes[block_id], None
        if block_hash is None:
            return
        self.version += 1
        others = self._duplicates.get(block_hash)
        if others is None:
            del self._blocks[block_hash]
            if self._on_removed is not None:
                self._on_removed(block_hash)
            return
        if self._blocks[block_hash] == block_id:
            self._blocks[block_hash] = others.pop(0)
        else:
            others.remove(block_id)
        if not others:
            del self._duplicates[block_hash]
