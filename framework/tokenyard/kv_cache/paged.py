"""PagedKVCacheManager: block tables with a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.kv_cache import Allocation, Hit, KVCacheManager, KVCacheUsage, KVRequest
from tokenyard.kv_cache.block_pool import BlockPool
from tokenyard.kv_cache.hashing import block_hash, root_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray


@dataclass(slots=True)
class _Table:
    """One request's blocks, and the digests of its full blocks as far as they were needed."""

    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)  # of blocks 0 .. len - 1
    num_committed: int = 0  # blocks at the start whose content is final


class PagedKVCacheManager(KVCacheManager):
    """Blocks of `block_size` tokens; one KV group.

    Window layers keep their whole table in this version; the window is applied by the attention backend's mask.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}

    def lookup(self, request: KVRequest) -> Hit:
        if not self._caching or request.skip_prefix_cache:
            return Hit(0)
        # One token is always left to compute: sampling needs its logits.
        hashes = self._hashes(request, (request.num_tokens - 1) // self._block_size)
        return Hit(len(self._cached_prefix(hashes)) * self._block_size)

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        table = self._tables.get(request.request_id) or _Table()
        hit_ids = self._hit_blocks(request, hit) if hit is not None and not table.block_ids else []
        num_blocks = -(-(num_tokens + num_lookahead) // self._block_size)
        num_new = max(0, num_blocks - len(table.block_ids) - len(hit_ids))
        num_revived = sum(self.pool.is_free(block_id) for block_id in hit_ids)
        if num_new + num_revived > self.pool.num_free:
            return None
        self.pool.take(hit_ids)
        added = hit_ids + self.pool.pop(num_new)
        table.block_ids.extend(added)
        table.num_committed += len(hit_ids)
        self._tables[request.request_id] = table
        return Allocation((np.array(added, dtype=np.int32),), len(table.block_ids) * self._block_size)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        if not self._caching:
            return
        table = self._tables[request.request_id]
        num_full = num_computed_tokens // self._block_size
        hashes = self._hashes(request, num_full)
        for index in range(table.num_committed, num_full):
            self.pool.publish(table.block_ids[index], hashes[index])
        table.num_committed = max(table.num_committed, num_full)

    def free(self, request: KVRequest) -> None:
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self.pool.release(table.block_ids)

    def reset(self) -> bool:
        if self.pool.num_free < self.pool.num_blocks:
            return False
        self.pool.clear()
        return True

    def block_ids(self, request: KVRequest) -> tuple[IntArray, ...]:
        table = self._tables.get(request.request_id) or _Table()
        return (np.array(table.block_ids, dtype=np.int32),)

    @property
    def usage(self) -> KVCacheUsage:
        return KVCacheUsage(self.pool.num_free, self.pool.num_blocks)

    def capacity_tokens(self) -> int:
        return self.pool.num_blocks * self._block_size

    def check_invariants(self) -> None:
        """Raise RuntimeError when references, tables and the free list disagree. For tests and debugging."""
        held: dict[int, int] = {}
        for table in self._tables.values():
            for block_id in table.block_ids:
                held[block_id] = held.get(block_id, 0) + 1
        for block_id in range(1, self.pool.num_blocks + 1):
            count = self.pool.ref_count(block_id)
            if count != held.get(block_id, 0) or (count == 0) != self.pool.is_free(block_id):
                raise RuntimeError(
                    f"block {block_id}: reference count {count}, held by {held.get(block_id, 0)} tables, "
                    f"free: {self.pool.is_free(block_id)}"
                )

    def _hashes(self, request: KVRequest, num_blocks: int) -> Sequence[bytes]:
        """Digests of the first `num_blocks` full blocks; remembered with the request's table."""
        table = self._tables.get(request.request_id)
        if table is None:
            # Kept for the next attempt to admit the request; `free` drops it.
            table = self._tables[request.request_id] = _Table()
        if len(table.hashes) < num_blocks:
            token_ids = request.token_ids
            size = self._block_size
            parent = table.hashes[-1] if table.hashes else root_hash(request.cache_salt, request.lora_name)
            for index in range(len(table.hashes), num_blocks):
                parent = block_hash(parent, token_ids[index * size : (index + 1) * size])
                table.hashes.append(parent)
        return table.hashes[:num_blocks]

    def _cached_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest cached prefix of `hashes`."""
        block_ids: list[int] = []
        for digest in hashes:
            block_id = self.pool.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _hit_blocks(self, request: KVRequest, hit: Hit) -> list[int]:
        block_ids = self._cached_prefix(self._hashes(request, hit.tokens // self._block_size))
        if len(block_ids) * self._block_size != hit.tokens:
            raise RuntimeError(f"a hit of {hit.tokens} tokens was taken after its blocks changed")
        return block_ids
