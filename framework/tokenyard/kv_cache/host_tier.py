"""HostTier: blocks in host memory, whose K/V is in which, and the copies that bring it there and back."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tokenyard.interfaces.kv_cache import KVCacheUsage
from tokenyard.kv_cache.block_pool import NULL_BLOCK
from tokenyard.scheduler_output import HostTransfer

if TYPE_CHECKING:
    from tokenyard.interfaces.kv_cache import KVRequest
    from tokenyard.kv_cache.groups import KVGroup

Tables: TypeAlias = list[list[int]]
"""A block table per KV group."""


class Load(NamedTuple):
    """A block to copy back; in order of blocks, so that the groups of a prefix age together."""

    block: int  # its number in the table
    group: int
    host_block: int


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """What host memory has of one request: of groups with a sliding window, what queries behind it read."""

    owner: KVRequest
    num_blocks: int  # whole blocks at the start, per KV group
    tables: Tables  # per KV group: host blocks of the last ones of these

    def first_block(self, group: int) -> int:
        """The first block of a group that is there."""
        return self.num_blocks - len(self.tables[group])


class HostTier:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1, each free or one request's.

    What must hold: a request is stored whole or not at all. Its blocks are free again once it is forgotten, and another
    may get them for copies of the same step: transfers are made in the order in which they were asked for. An entry
    belongs to a request object: when an id is used again, nothing is found.
    """

    def __init__(self, num_blocks: int, groups: Sequence[KVGroup], block_size: int) -> None:
        self.num_blocks = num_blocks
        self.version = 0  # while it stands still, `find` answers as before
        self._groups = groups
        self._block_size = block_size
        self._free = list(range(num_blocks))  # a heap: low ids first, so that neighbours are copied together
        self._entries: dict[str, SwappedOut] = {}
        self._transfers: list[HostTransfer] = []

    @property
    def usage(self) -> KVCacheUsage:
        return KVCacheUsage(len(self._free), self.num_blocks)

    def find(self, request: KVRequest) -> SwappedOut | None:
        """What is there of a request."""
        entry = self._entries.get(request.request_id)
        return entry if entry is not None and entry.owner is request else None

    def num_usable(self, swapped: SwappedOut, request: KVRequest) -> int:
        """Blocks at its start that a request need not compute again. One token is always left: sampling needs it."""
        num_blocks = min(swapped.num_blocks, (request.num_tokens - 1) // self._block_size)
        reaches = all(swapped.first_block(group.index) <= self._first_read(group, num_blocks) for group in self._groups)
        return num_blocks if reaches else 0

    def tables(
        self, swapped: SwappedOut, num_blocks: int, find: Callable[[int, int], int | None] = lambda group, block: None
    ) -> tuple[Tables, list[Load]]:
        """Block tables of so many blocks, and what to copy into them: what `find` does not know by group and number.

        Block 0 stands for what is to be copied, and for what has left a window.
        """
        tables: Tables = [[NULL_BLOCK] * num_blocks for _ in self._groups]
        loads = []
        for group in self._groups:
            first = swapped.first_block(group.index)
            for block in range(self._first_read(group, num_blocks), num_blocks):
                block_id = find(group.index, block)
                if block_id is None:
                    loads.append(Load(block, group.index, swapped.tables[group.index][block - first]))
                else:
                    tables[group.index][block] = block_id
        return tables, sorted(loads)

    def store(self, request: KVRequest, num_blocks: int, tables: Sequence[Sequence[int]]) -> bool:
        """Copy the first `num_blocks` blocks of a request's tables, as far as queries behind them read.

        False, having changed nothing, when that is more than is free, or when it has left a window already. What was
        there under the request's id is dropped.
        """
        read = [
            list(table[self._first_read(group, num_blocks) : num_blocks])
            for group, table in zip(self._groups, tables, strict=True)
        ]
        stale = self._entries.get(request.request_id)
        num_free = len(self._free) + (0 if stale is None else sum(map(len, stale.tables)))
        if sum(map(len, read)) > num_free or any(NULL_BLOCK in table for table in read):
            return False
        self._drop(request.request_id)
        host_tables = [[heapq.heappop(self._free) for _ in table] for table in read]
        self._entries[request.request_id] = SwappedOut(request, num_blocks, host_tables)
        self.version += 1
        for group, (table, host_table) in enumerate(zip(read, host_tables, strict=True)):
            self._add(table, host_table, to_host=True, group=group)
        return True

    def load(self, loads: Sequence[Load], tables: Tables) -> None:
        """Copy back to where these tables have the blocks by now."""
        for group in sorted({load.group for load in loads}):
            rows = [load for load in loads if load.group == group]
            block_ids, host_block_ids = [tables[group][row.block] for row in rows], [row.host_block for row in rows]
            self._add(block_ids, host_block_ids, to_host=False, group=group)

    def forget(self, request: KVRequest) -> None:
        """What is there of a request is not needed any more; nothing there is no error."""
        if self.find(request) is not None:
            self._drop(request.request_id)

    def clear(self) -> None:
        """Forget everybody."""
        for request_id in list(self._entries):
            self._drop(request_id)

    def take_transfers(self) -> Sequence[HostTransfer]:
        """The copies that were asked for since the last call, in order."""
        if not self._transfers:
            return ()
        transfers, self._transfers = self._transfers, []
        return transfers

    def check_invariants(self) -> None:
        """Raise RuntimeError unless every block is free or one request's. For tests and debugging."""
        held = [block for entry in self._entries.values() for table in entry.tables for block in table]
        if sorted([*self._free, *held]) != list(range(self.num_blocks)):
            raise RuntimeError(f"host blocks {self._free} are free and {held} held, of {self.num_blocks}")

    def _first_read(self, group: KVGroup, num_blocks: int) -> int:
        """The first block of a group that queries behind so many blocks read."""
        return group.num_passed(num_blocks * self._block_size, self._block_size)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self.version += 1
            for block in (block for table in entry.tables for block in table):
                heapq.heappush(self._free, block)

    def _add(self, block_ids: Sequence[int], host_block_ids: Sequence[int], *, to_host: bool, group: int) -> None:
        if block_ids:
            device, host = (np.array(ids, dtype=np.int32) for ids in (block_ids, host_block_ids))
            self._transfers.append(HostTransfer(device, host, to_host, group))
