"""RadixKVCacheManager: block tables with a prefix tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from tokenyard.kv_cache.event_log import KVEventLog
from tokenyard.kv_cache.hashing import HashChain, RememberedChains
from tokenyard.kv_cache.radix_blocks import RadixBlocks
from tokenyard.kv_cache.radix_tree import BlockLabels
from tokenyard.kv_cache.retention import level_of

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.kv_cache.radix_tree import Node
    from tokenyard.kv_events import KVEvent


@dataclass(slots=True)
class _Holding:
    """The blocks of one request."""

    table: list[int]
    num_published: int  # blocks at the start whose content is final and in the tree
    end: Node | None  # the node where these end
    level: int  # of retention
    chain: HashChain | None  # where somebody wants events


class RadixKVCacheManager(KVCacheManager):
    """Blocks of `block_size` tokens, for models whose layers all attend to everything (RadixAttention, 2024).

    What requests begin with is a tree of runs of blocks, one tree for each pair of salt and adapter: nothing is
    hashed, and with `block_size=1` requests share whatever tokens they begin with. The leaf that was used longest ago
    is evicted first, from its end; a leaf is as recent as the last request that used any of it and has gone.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        retention_share: float = 0.5,
        records_events: bool = False,
    ) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._events = KVEventLog(block_size) if records_events else None
        self.blocks = RadixBlocks(
            num_blocks,
            retention_share=retention_share,
            on_removed=None if self._events is None else self._events.add_removed,
        )
        self._held: dict[str, _Holding] = {}
        self._names = RememberedChains(block_size)  # of requests whose names a policy asked for
        # A view of one id costs a quarter of a new array.
        self._ids: IntArray = np.arange(num_blocks + 1, dtype=np.int32)
        self._ids.flags.writeable = False

    def lookup(self, request: KVRequest) -> Hit:
        limit = self._hit_limit(request)
        return Hit(self._match(request, limit)[0] * self._block_size) if limit else Hit(0)

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        num_blocks = -(-(num_tokens + num_lookahead) // self._block_size)
        held = self._held.get(request.request_id)
        if held is None:
            return self._admit(request, num_blocks, hit)
        if hit is not None and hit.tokens:
            raise RuntimeError(f"request {request.request_id} holds blocks already: only its first call takes {hit}")
        num_new = max(0, num_blocks - len(held.table))
        if num_new > self.blocks.num_free:
            return None
        new = self.blocks.pop(num_new)
        held.table += new
        return self._allocation(new, held)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        held = self._held.get(request.request_id)
        if held is None or num_computed_tokens > len(held.table) * self._block_size:
            raise RuntimeError(f"request {request.request_id} holds no blocks for {num_computed_tokens} tokens")
        num_full = num_computed_tokens // self._block_size
        if self._caching and num_full > held.num_published:
            self._publish(request, held, num_full)

    def free(self, request: KVRequest) -> None:
        self._names.drop(request.request_id)
        held = self._held.pop(request.request_id, None)
        if held is not None:
            self.blocks.release(held.table, held.end, held.num_published, held.level)

    def reset(self) -> bool:
        if self.blocks.num_free < self.blocks.num_blocks:
            return False
        if self.blocks.clear() and self._events is not None:
            self._events.add_cleared()
        return True

    def block_ids(self, request: KVRequest) -> tuple[IntArray, ...]:
        held = self._held.get(request.request_id)
        return (np.array([] if held is None else held.table, dtype=np.int32),)

    @property
    def usage(self) -> KVCacheUsage:
        return KVCacheUsage(self.blocks.num_free, self.blocks.num_blocks)

    def capacity_tokens(self) -> int:
        return self.blocks.num_blocks * self._block_size

    @property
    def prefix_version(self) -> int:
        return self.blocks.version

    def num_exclusive_blocks(self, request: KVRequest) -> int:
        held = self._held.get(request.request_id)
        return 0 if held is None else self.blocks.num_exclusive(held.table)

    def num_saved_blocks(self, request: KVRequest, hit: Hit, without: Sequence[KVRequest] = ()) -> int:
        num_hit = hit.tokens // self._block_size
        if not num_hit:
            return 0
        used = [block_id for node in self._hit_nodes(request, hit) for block_id in node.blocks][:num_hit]
        given = Counter(
            block_id
            for one in without
            if (held := self._held.get(one.request_id)) is not None
            for block_id in held.table
        )
        return sum(self.blocks.ref_count(block_id) != given[block_id] for block_id in used)

    def prefix_hashes(self, request: KVRequest) -> Sequence[bytes]:
        limit = self._hit_limit(request)
        return self._names.get(request).extend(request, limit)[:limit] if limit else ()

    def take_events(self) -> Sequence[KVEvent]:
        return () if self._events is None else self._events.take()

    def inspect(self) -> KVCacheInspection:
        counts = {block_id: self.blocks.ref_count(block_id) for block_id in range(1, self.blocks.num_blocks + 1)}
        return KVCacheInspection(ref_counts=counts, cached_hashes=self.blocks.tree.digests(self._block_size))

    def check_invariants(self) -> None:
        """Raise RuntimeError when references, tables, tree and free blocks disagree. For tests and debugging."""
        self.blocks.check(Counter(block_id for held in self._held.values() for block_id in held.table))

    # Inside

    def _hit_limit(self, request: KVRequest) -> int:
        """Blocks that may be skipped. One token is always left to compute: sampling needs its logits."""
        if not self._caching or request.skip_prefix_cache:
            return 0
        return (request.num_tokens - 1) // self._block_size

    def _match(self, request: KVRequest, limit: int) -> tuple[int, list[Node]]:
        labels = BlockLabels(request, self._block_size, 0, limit)
        return self.blocks.tree.match((request.cache_salt, request.lora_name), labels)

    def _admit(self, request: KVRequest, num_blocks: int, hit: Hit | None) -> Allocation | None:
        """The first blocks of a request, those of its hit before all."""
        nodes = self._hit_nodes(request, hit) if hit is not None and hit.tokens else []
        num_hit = 0 if hit is None else hit.tokens // self._block_size
        table = [block_id for node in nodes for block_id in node.blocks][:num_hit]
        num_new = max(0, num_blocks - num_hit)
        if num_new + self.blocks.num_idle(table) > self.blocks.num_free:
            return None
        self.blocks.take(table)  # before new ones are handed out: those could be among the hit's
        table += self.blocks.pop(num_new)
        held = self._held[request.request_id] = _Holding(
            table=table,
            num_published=num_hit,
            end=nodes[-1] if nodes else None,
            level=level_of(request),
            chain=None if self._events is None else HashChain(self._block_size),
        )
        return self._allocation(table, held)

    def _hit_nodes(self, request: KVRequest, hit: Hit) -> list[Node]:
        num_blocks, rest = divmod(hit.tokens, self._block_size)
        if rest == 0 and num_blocks <= self._hit_limit(request):
            depth, nodes = self._match(request, num_blocks)
            if depth == num_blocks:
                return nodes
        raise RuntimeError(
            f"request {request.request_id}: {hit} is not, or no longer, in the cache; look the request up again"
        )

    def _allocation(self, new: list[int], held: _Holding) -> Allocation:
        ids = self._ids[new[0] : new[0] + 1] if len(new) == 1 else np.array(new, dtype=np.int32)
        return Allocation((ids,), len(held.table) * self._block_size)

    def _publish(self, request: KVRequest, held: _Holding, num_full: int) -> None:
        first, held.num_published = held.num_published, num_full
        digests = [] if held.chain is None else held.chain.extend(request, num_full)
        labels = BlockLabels(request, self._block_size, first, num_full)
        tenant = (request.cache_salt, request.lora_name)
        held.end, num_known = self.blocks.publish(tenant, labels, held.table, held.end, first, digests)
        if self._events is not None:
            for block in range(num_known, num_full):
                self._events.add_stored(request, digests, block, 0)
