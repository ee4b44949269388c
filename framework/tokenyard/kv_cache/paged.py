"""PagedKVCacheManager: block tables with a prefix cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.kv_cache import (
    NO_BLOCKS,
    Allocation,
    Hit,
    KVCacheInspection,
    KVCacheManager,
    KVCacheUsage,
    KVRequest,
)
from tokenyard.kv_cache.block_pool import NULL_BLOCK, BlockPool
from tokenyard.kv_cache.event_log import KVEventLog
from tokenyard.kv_cache.eviction import LRUEviction, MakeEviction
from tokenyard.kv_cache.groups import KVGroup, cached_prefix, longest_hit
from tokenyard.kv_cache.hashing import HashChain, RememberedChains
from tokenyard.kv_cache.host_tier import HostTier, Load, SwappedOut, Tables
from tokenyard.kv_cache.invariants import check_pool, check_tables
from tokenyard.kv_cache.retention import level_of

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.kv_events import KVEvent
    from tokenyard.scheduler_output import HostTransfer


@dataclass(slots=True)
class _Holding:
    """The blocks of one request."""

    owner: KVRequest
    chain: HashChain
    tables: list[list[int]]  # per KV group; all as long as each other
    num_committed: int  # blocks at the start whose content is final and published
    num_passed: list[int]  # per KV group: entries at the start that have left its window and are NULL_BLOCK
    level: int  # of retention, of what is published next

    def in_order_of_eviction(self) -> Iterable[int]:
        """The blocks from the last to the first: a prefix is evicted from its end, in all groups alike."""
        if len(self.tables) == 1 and not self.num_passed[0]:
            return reversed(self.tables[0])
        rows = zip(*map(reversed, self.tables), strict=True)
        return [block_id for row in rows for block_id in row if block_id != NULL_BLOCK]


class PagedKVCacheManager(KVCacheManager):
    """Blocks of `block_size` tokens, a table per KV group, one pool for all.

    A full block's content can be found from the `commit` that covers it until the rule of `make_eviction` gives the
    block away. Without prefix caching nothing is hashed. With `num_host_blocks` there is room for requests that are
    swapped out; what a request gets back from there can be found like what it computed.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        group_windows: Sequence[int | None] = (None,),
        make_eviction: MakeEviction = LRUEviction,
        retention_share: float = 0.5,
        records_events: bool = False,
        num_host_blocks: int = 0,
    ) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._groups = [KVGroup(index, window, block_size) for index, window in enumerate(group_windows)]
        self._windowed = [group for group in self._groups if group.window is not None]
        self._is_plain = len(self._groups) == 1 and not self._windowed
        # A subclass that allocates in its own way is asked for every block.
        self._appends = len(self._groups) == 1 and type(self).allocate is PagedKVCacheManager.allocate
        self._events = KVEventLog(block_size) if records_events else None
        self.pool = BlockPool(
            num_blocks,
            make_eviction=make_eviction,
            retention_share=retention_share,
            on_removed=None if self._events is None else self._events.add_removed,
        )
        self._host = HostTier(num_host_blocks, self._groups, block_size) if num_host_blocks else None
        self._held: dict[str, _Holding] = {}
        self._chains = RememberedChains(block_size)  # of requests that hold nothing
        # A view of one id costs a quarter of a new array.
        self._ids: IntArray = np.arange(num_blocks + 1, dtype=np.int32)
        self._ids.flags.writeable = False

    def lookup(self, request: KVRequest) -> Hit:
        hit = self._cached(request)
        if self._host is None or (swapped := self._host.find(request)) is None:
            return hit
        tokens = self._host.num_usable(swapped, request) * self._block_size
        return hit if tokens <= hit.tokens else Hit(tokens, swapped=tokens - hit.tokens)

    def _cached(self, request: KVRequest) -> Hit:
        limit = self._hit_limit(request)
        if limit == 0:
            return Hit(0)
        chain = self._chain(request)
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

    def allocate_next(self, requests: Sequence[KVRequest]) -> tuple[IntArray, ...] | None:
        if not self._appends or len(requests) > self.pool.num_free:
            return None
        held, block_ids = self._held, self.pool.pop(len(requests))
        for request, block_id in zip(requests, block_ids, strict=True):
            held[request.request_id].tables[0].append(block_id)
        return (np.array(block_ids, dtype=np.int32),)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        held = self._held.get(request.request_id)
        if held is None or num_computed_tokens > len(held.tables[0]) * self._block_size:
            raise RuntimeError(f"request {request.request_id} holds no blocks for {num_computed_tokens} tokens")
        num_full = num_computed_tokens // self._block_size
        if self._caching and num_full > held.num_committed:
            self._publish(request, held, num_full)
        # Who is swapped out goes on at the edge of a block: what that reads must be there.
        resumed_at = num_computed_tokens if self._host is None else num_full * self._block_size
        for group in self._windowed:
            self._release_passed(held, group, resumed_at)

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
        if self._host is not None:
            self._host.clear()
        return True

    def block_ids(self, request: KVRequest) -> tuple[IntArray, ...]:
        return tuple(np.array(table, dtype=np.int32) for table in self._tables_of(request))

    @property
    def needs_commits(self) -> bool:
        return self._caching or bool(self._windowed)

    @property
    def usage(self) -> KVCacheUsage:
        return KVCacheUsage(self.pool.num_free, self.pool.num_blocks)

    def capacity_tokens(self) -> int:
        # A window group holds a prompt whole before the first step has passed any of it.
        return self.pool.num_blocks // len(self._groups) * self._block_size

    @property
    def prefix_version(self) -> int:
        return self.pool.version if self._host is None else self.pool.version + self._host.version

    def num_exclusive_blocks(self, request: KVRequest) -> int:
        held = self._held.get(request.request_id)
        return 0 if held is None else sum(map(self.pool.num_exclusive, held.tables))

    def num_saved_blocks(self, request: KVRequest, hit: Hit, without: Sequence[KVRequest] = ()) -> int:
        if not hit.tokens:
            return 0
        loads: list[Load] = []
        tables = self._hit_tables(request, hit, loads)
        given = Counter(block_id for one in without for table in self._tables_of(one) for block_id in table)
        used = [block_id for table in tables for block_id in table if block_id != NULL_BLOCK]
        num_idle = sum(self.pool.ref_count(block_id) == given[block_id] for block_id in used)
        return sum(map(len, tables)) - len(loads) - num_idle

    def prefix_hashes(self, request: KVRequest) -> Sequence[bytes]:
        limit = self._hit_limit(request)
        return self._chain(request).extend(request, limit)[:limit] if limit else ()

    def take_events(self) -> Sequence[KVEvent]:
        return () if self._events is None else self._events.take()

    def swap_out(self, request: KVRequest, num_computed_tokens: int) -> bool:
        held = self._held.get(request.request_id)
        if held is None or num_computed_tokens > len(held.tables[0]) * self._block_size:
            raise RuntimeError(f"request {request.request_id} holds no blocks for {num_computed_tokens} tokens")
        num_full = num_computed_tokens // self._block_size
        if self._host is None or num_full == 0:
            return False
        return self._host.store(request, num_full, held.tables)

    def forget_swapped(self, request: KVRequest) -> None:
        if self._host is not None:
            self._host.forget(request)

    def take_transfers(self) -> Sequence[HostTransfer]:
        return () if self._host is None else self._host.take_transfers()

    def inspect(self) -> KVCacheInspection:
        counts = {block_id: self.pool.ref_count(block_id) for block_id in range(1, self.pool.num_blocks + 1)}
        host = NO_BLOCKS if self._host is None else self._host.usage
        return KVCacheInspection(ref_counts=counts, cached_hashes=self.pool.cached_hashes(), host=host)

    def check_invariants(self) -> None:
        """Raise RuntimeError when references, tables, content and the free list disagree. For tests and debugging."""
        held: Counter[int] = Counter()
        for request_id, holding in self._held.items():
            check_tables(request_id, holding.tables, holding.num_passed)
            held.update(block_id for table in holding.tables for block_id in table if block_id != NULL_BLOCK)
        check_pool(self.pool, held)
        if self._host is not None:
            self._host.check_invariants()

    # Allocating, in parts

    def _admit(self, request: KVRequest, num_blocks: int, hit: Hit | None) -> Allocation | None:
        """The first blocks of a request, those of its hit before all."""
        loads: list[Load] = []
        tables = self._hit_tables(request, hit, loads) if hit is not None and hit.tokens else [[] for _ in self._groups]
        num_hit = len(tables[0])
        num_new = max(0, num_blocks - num_hit)
        is_simple = self._is_plain and not loads
        hit_ids = list(tables[0]) if is_simple else [id_ for table in tables for id_ in table if id_ != NULL_BLOCK]
        if num_new * len(tables) + len(loads) + self.pool.num_idle(hit_ids) > self.pool.num_free:
            return None
        level = self.pool.take(
            hit_ids, level_of(request)
        )  # before new ones are handed out: those could be among the hit's
        for load, block_id in zip(loads, self.pool.pop(len(loads)) if loads else (), strict=True):
            tables[load.group][load.block] = block_id
        self._grow(tables, num_new)
        num_passed = [0] if self._is_plain else [table[:num_hit].count(NULL_BLOCK) for table in tables]
        held = self._held[request.request_id] = _Holding(
            owner=request,
            chain=self._chains.take(request),
            tables=tables,
            num_committed=num_hit,
            num_passed=num_passed,
            level=level,
        )
        if self._host is not None:
            self._swap_in(self._host, request, held, loads)
        return Allocation(self._arrays(tables), len(tables[0]) * self._block_size)

    def _hit_tables(self, request: KVRequest, hit: Hit, loads: list[Load]) -> list[list[int]]:
        """The block tables behind a hit; `loads` gets what has to be copied from host memory, with block 0 there."""
        num_blocks, rest = divmod(hit.tokens, self._block_size)
        swapped = self._host.find(request) if self._host is not None and hit.swapped else None
        if self._host is not None and swapped is not None:
            swapped_tables, to_load = self._swapped_tables(self._host, request, swapped)
            if len(swapped_tables[0]) * self._block_size == hit.tokens:
                loads += to_load
                return swapped_tables
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

    def _tables_of(self, request: KVRequest) -> Sequence[Sequence[int]]:
        held = self._held.get(request.request_id)
        return [()] * len(self._groups) if held is None else held.tables

    def _chain(self, request: KVRequest) -> HashChain:
        """An ended request whose id is in use again may still be looked up, by a policy that remembers it."""
        held = self._held.get(request.request_id)
        return held.chain if held is not None and held.owner is request else self._chains.get(request)

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

    # Host memory

    def _swapped_tables(self, host: HostTier, request: KVRequest, swapped: SwappedOut) -> tuple[Tables, list[Load]]:
        """The block tables of who comes back; what the prefix cache still has is shared."""
        num_blocks = host.num_usable(swapped, request)
        if not 0 < num_blocks <= self._hit_limit(request):
            return host.tables(swapped, num_blocks)
        digests = self._chains.get(request).extend(request, num_blocks)[:num_blocks]
        keys = [group.keys(digests) for group in self._groups]
        return host.tables(swapped, num_blocks, lambda group, block: self.pool.find(keys[group][block]))

    def _swap_in(self, host: HostTier, request: KVRequest, held: _Holding, loads: Sequence[Load]) -> None:
        """Copy and publish what was swapped out of a request that holds blocks again, and forget it there."""
        host.load(loads, held.tables)
        host.forget(request)
        if not loads or not self._caching:
            return
        digests = held.chain.extend(request, held.num_committed)
        keys = [self._groups[load.group].key(digests[load.block]) for load in loads]
        if self._events is not None:
            for load, key in zip(loads, keys, strict=True):
                if self.pool.find(key) is None:
                    self._events.add_stored(request, digests, load.block, load.group)
        held.level = self.pool.publish([held.tables[load.group][load.block] for load in loads], keys, held.level)

    # Committing, in parts

    def _publish(self, request: KVRequest, held: _Holding, num_full: int) -> None:
        first, held.num_committed = held.num_committed, num_full
        digests = held.chain.extend(request, num_full)
        keys = [group.keys(digests[first:num_full]) for group in self._groups]
        tables = [table[first:num_full] for table in held.tables]
        if self._events is not None:
            self._log_stored(self._events, request, digests, first, keys)
        if len(tables) == 1:
            held.level = self.pool.publish(tables[0], keys[0], held.level)
        else:
            # Block by block, so that the groups of a prefix age together
            held.level = self.pool.publish(
                [block_id for row in zip(*tables, strict=True) for block_id in row],
                [key for row in zip(*keys, strict=True) for key in row],
                held.level,
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
