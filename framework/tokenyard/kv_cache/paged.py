"""PagedKVCacheManager: block tables with a prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.kv_cache import (
    Allocation,
    Hit,
    KVCacheInspection,
    KVCacheManager,
    KVCacheUsage,
    KVRequest,
)
from tokenyard.kv_cache.block_pool import NULL_BLOCK, BlockPool
from tokenyard.kv_cache.event_log import KVEventLog
from tokenyard.kv_cache.groups import KVGroup, cached_prefix, longest_hit
from tokenyard.kv_cache.hashing import HashChain, RememberedChains
from tokenyard.kv_cache.invariants import check_pool, check_tables

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.kv_events import KVEvent


@dataclass(slots=True)
class _Holding:
    """The blocks of one request."""

    owner: KVRequest
    chain: HashChain
    tables: list[list[int]]  # per KV group; all as long as each other
    num_committed: int  # blocks at the start whose content is final and published
    num_passed: list[int]  # per KV group: entries at the start that have left its window and are NULL_BLOCK

    def in_order_of_eviction(self) -> Iterable[int]:
        """The blocks from the last to the first: a prefix is evicted from its end, in all groups alike."""
        rows = zip(*map(reversed, self.tables), strict=True)
        return [block_id for row in rows for block_id in row if block_id != NULL_BLOCK]


class PagedKVCacheManager(KVCacheManager):
    """Blocks of `block_size` tokens, a table per KV group, one pool for all.

    A full block's content can be found from the `commit` that covers it until the eviction rule (`lru` or `fifo`) gives
    the block away. Without prefix caching nothing is hashed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        group_windows: Sequence[int | None] = (None,),
        eviction: str = "lru",
        records_events: bool = False,
    ) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._groups = [KVGroup(index, window, block_size) for index, window in enumerate(group_windows)]
        self._windowed = [group for group in self._groups if group.window is not None]
        self._is_plain = len(self._groups) == 1 and not self._windowed
        self._events = KVEventLog(block_size) if records_events else None
        self.pool = BlockPool(
            num_blocks, eviction=eviction, on_removed=None if self._events is None else self._events.add_removed
        )
        self._held: dict[str, _Holding] = {}
        self._chains = RememberedChains(block_size)  # of requests that hold nothing
        # A view of one id costs a quarter of a new array.
        self._ids: IntArray = np.arange(num_blocks + 1, dtype=np.int32)
        self._ids.flags.writeable = False

    def lookup(self, request: KVRequest) -> Hit:
        limit = self._hit_limit(request)
        if limit == 0:
            return Hit(0)
        held = self._held.get(request.request_id)
        # An ended request whose id is in use again may still be looked up, by a policy that remembers it.
        chain = held.chain if held is not None and held.owner is request else self._chains.get(request)
        digests = chain.extend(request, limit)[:limit]
        if not self._is_plain:
            return Hit(longest_hit(self._groups, digests, self.pool.find) * self._block_size)
        table = cached_prefix(digests, self.pool.find)
        chain.found = (self.pool.version, table)
        return Hit(len(table) * self._block_size)

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        num_blocks = -(-(num_tokens + num_lookahead) // self._block_size)
        held = self._held.get(request.request_id)
        if held is None:
            return self._admit(request, num_blocks, hit)
        if hit is not None and hit.tokens:
            raise RuntimeError(f"request {request.request_id} holds blocks already: only its first call takes {hit}")
        tables = held.tables
        num_new = num_blocks - len(tables[0])
        if num_new <= 0:
            return Allocation((self._ids[:0],) * len(tables), len(tables[0]) * self._block_size)
        if num_new * len(tables) > self.pool.num_free:
            return None
        return Allocation(self._arrays(self._grow(tables, num_new)), len(tables[0]) * self._block_size)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        held = self._held.get(request.request_id)
        if held is None or num_computed_tokens > len(held.tables[0]) * self._block_size:
            raise RuntimeError(f"request {request.request_id} holds no blocks for {num_computed_tokens} tokens")
        num_full = num_computed_tokens // self._block_size
        if self._caching and num_full > held.num_committed:
            self._publish(request, held, num_full)
        for group in self._windowed:
            self._release_passed(held, group, num_computed_tokens)

    def free(self, request: KVRequest) -> None:
        self._chains.drop(request.request_id)
        held = self._held.pop(request.request_id, None)
        if held is not None:
            self.pool.release(held.in_order_of_eviction())

    def reset(self) -> bool:
        if self.pool.num_free < self.pool.num_blocks:
            return False
        if self.pool.clear() and self._events is not None:
            self._events.add_cleared()
        return True

    def block_ids(self, request: KVRequest) -> tuple[IntArray, ...]:
        held = self._held.get(request.request_id)
        tables = [[] for _ in self._groups] if held is None else held.tables
        return tuple(np.array(table, dtype=np.int32) for table in tables)

    @property
    def usage(self) -> KVCacheUsage:
        return KVCacheUsage(self.pool.num_free, self.pool.num_blocks)

    def capacity_tokens(self) -> int:
        # A window group holds a prompt whole before the first step has passed any of it.
        return self.pool.num_blocks // len(self._groups) * self._block_size

    def take_events(self) -> Sequence[KVEvent]:
        return () if self._events is None else self._events.take()

    def inspect(self) -> KVCacheInspection:
        counts = {block_id: self.pool.ref_count(block_id) for block_id in range(1, self.pool.num_blocks + 1)}
        return KVCacheInspection(ref_counts=counts, cached_hashes=self.pool.cached_hashes())

    def check_invariants(self) -> None:
        """Raise RuntimeError when references, tables, content and the free list disagree. For tests and debugging."""
        held: Counter[int] = Counter()
        for request_id, holding in self._held.items():
            check_tables(request_id, holding.tables, holding.num_passed)
            held.update(block_id for table in holding.tables for block_id in table if block_id != NULL_BLOCK)
        check_pool(self.pool, held)

    # Allocating, in parts

    def _admit(self, request: KVRequest, num_blocks: int, hit: Hit | None) -> Allocation | None:
        """The first blocks of a request, those of its hit before all."""
        tables = self._hit_tables(request, hit) if hit is not None and hit.tokens else [[] for _ in self._groups]
        num_hit = len(tables[0])
        num_new = max(0, num_blocks - num_hit)
        hit_ids = list(tables[0]) if self._is_plain else [id_ for table in tables for id_ in table if id_ != NULL_BLOCK]
        if num_new * len(tables) + self.pool.num_idle(hit_ids) > self.pool.num_free:
            return None
        self.pool.take(hit_ids)  # before new ones are handed out: those could be among the hit's
        self._grow(tables, num_new)
        num_passed = [0] if self._is_plain else [table[:num_hit].count(NULL_BLOCK) for table in tables]
        self._held[request.request_id] = _Holding(
            owner=request, chain=self._chains.take(request), tables=tables, num_committed=num_hit, num_passed=num_passed
        )
        return Allocation(self._arrays(tables), len(tables[0]) * self._block_size)

    def _hit_tables(self, request: KVRequest, hit: Hit) -> list[list[int]]:
        num_blocks, rest = divmod(hit.tokens, self._block_size)
        chain = self._chains.get(request)
        if chain.found is not None and chain.found[0] == self.pool.version and len(chain.found[1]) == num_blocks:
            return [list(chain.found[1])]
        if rest == 0 and 0 < num_blocks <= self._hit_limit(request):
            digests = chain.extend(request, num_blocks)[:num_blocks]
            tables = [group.hit_table(group.keys(digests), self.pool.find) for group in self._groups]
            found = [table for table in tables if table is not None]
            if len(found) == len(tables):
                return found
        raise RuntimeError(
            f"request {request.request_id}: {hit} is not, or no longer, in the cache; look the request up again"
        )

    def _hit_limit(self, request: KVRequest) -> int:
        """Blocks that may be skipped. One token is always left to compute: sampling needs its logits."""
        if not self._caching or request.skip_prefix_cache:
            return 0
        return (request.num_tokens - 1) // self._block_size

    def _grow(self, tables: list[list[int]], num_new: int) -> list[list[int]]:
        """Append so many blocks to each table; returns them."""
        block_ids = self.pool.pop(num_new * len(tables))
        if len(tables) == 1:
            tables[0] += block_ids
            return [block_ids]
        new = [block_ids[index * num_new : (index + 1) * num_new] for index in range(len(tables))]
        for table, added in zip(tables, new, strict=True):
            table += added
        return new

    def _arrays(self, tables: list[list[int]]) -> tuple[IntArray, ...]:
        return tuple(
            [self._ids[ids[0] : ids[0] + 1] if len(ids) == 1 else np.array(ids, dtype=np.int32) for ids in tables]
        )

    # Committing, in parts

    def _publish(self, request: KVRequest, held: _Holding, num_full: int) -> None:
        first, held.num_committed = held.num_committed, num_full
        digests = held.chain.extend(request, num_full)
        keys = [group.keys(digests[first:num_full]) for group in self._groups]
        tables = [table[first:num_full] for table in held.tables]
        if self._events is not None:
            self._log_stored(self._events, request, digests, first, keys)
        if len(tables) == 1:
            self.pool.publish(tables[0], keys[0])
        else:
            # Block by block, so that the groups of a prefix age together
            self.pool.publish(
                [block_id for row in zip(*tables, strict=True) for block_id in row],
                [key for row in zip(*keys, strict=True) for key in row],
            )

    def _log_stored(
        self,
        events: KVEventLog,
        request: KVRequest,
        digests: Sequence[bytes],
        first: int,
        keys: Sequence[Sequence[bytes]],
    ) -> None:
        for offset, row in enumerate(zip(*keys, strict=True)):
            for group, key in enumerate(row):
                if self.pool.find(key) is None:
                    events.add_stored(request, digests, first + offset, group)

    def _release_passed(self, held: _Holding, group: KVGroup, num_computed_tokens: int) -> None:
        """Give back what no later query of a window group reads; the content stays cached until it is evicted."""
        before = held.num_passed[group.index]
        passed = group.num_passed(num_computed_tokens, self._block_size)
        if passed > before:
            table = held.tables[group.index]
            self.pool.release(reversed(table[before:passed]))
            table[before:passed] = [NULL_BLOCK] * (passed - before)
            held.num_passed[group.index] = passed
