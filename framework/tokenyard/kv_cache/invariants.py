"""What must hold of a pool and the block tables over it at any moment; for tests and debugging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tokenyard.kv_cache.block_pool import NULL_BLOCK, BlockPool


def check_pool(pool: BlockPool, held: Mapping[int, int]) -> None:
    """Raise RuntimeError unless counts, free list and content agree; `held`: table entries per block."""
    for block_id in range(1, pool.num_blocks + 1):
        count, is_free, entries = pool.ref_count(block_id), pool.is_free(block_id), held.get(block_id, 0)
        if count != entries or (count == 0) != is_free:
            raise RuntimeError(
                f"block {block_id}: reference count {count}, in {entries} table entries, free: {is_free}"
            )
        block_hash = pool.block_hash(block_id)
        if block_hash is not None and block_id not in pool.find_all(block_hash):
            raise RuntimeError(f"block {block_id} has a hash under which it cannot be found")
    num_free = sum(pool.is_free(block_id) for block_id in range(1, pool.num_blocks + 1))
    if pool.num_free != num_free:
        raise RuntimeError(f"{num_free} blocks are free, and the free list says {pool.num_free}")
    if pool.ref_count(NULL_BLOCK) or pool.is_free(NULL_BLOCK) or pool.block_hash(NULL_BLOCK) is not None:
        raise RuntimeError("block 0 was handed out, freed or published")
    for block_hash in pool.cached_hashes():
        for block_id in pool.find_all(block_hash):
            if pool.block_hash(block_id) != block_hash:
                raise RuntimeError(f"block {block_id} can be found under a hash that is not its own")


def check_tables(request_id: str, tables: Sequence[Sequence[int]], num_passed: Sequence[int]) -> None:
    """Raise RuntimeError unless a request's tables, one a group, are as long as each other and have no block twice."""
    entries = Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)
    twice = [block_id for block_id, count in entries.items() if count > 1]
    if twice:
        raise RuntimeError(f"request {request_id}: blocks {twice} are in its tables more than once")
    lengths = [len(table) for table in tables]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"request {request_id}: its tables have different lengths {lengths}")
    for group, (table, passed) in enumerate(zip(tables, num_passed, strict=True)):
        if any(table[:passed]) or NULL_BLOCK in table[passed:]:
            raise RuntimeError(
                f"request {request_id}: exactly the first {passed} entries of group {group} have left the window, "
                f"but the table is {list(table)}"
            )
