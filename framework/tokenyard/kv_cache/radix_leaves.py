"""LeafQueue: which leaf of a radix tree is evicted next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.kv_cache.retention import HIGH, LEVELS, NORMAL

if TYPE_CHECKING:
    from tokenyard.kv_cache.radix_tree import Node

_Entry: TypeAlias = tuple[int, int, "Node"]  # last used, number of the entry, leaf

_LOW = min(LEVELS.values())


class LeafQueue:
    """Leaves that can be evicted, `low` ones first, then `normal` and `high` ones; in a level by when they were used.

    While `high` has more than its share of the blocks, its leaves and `normal` ones go by when they were used alone. A
    node has one entry at most, with its level and use of some time ago, which only grow: so it never comes up too late.
    """

    def __init__(self, is_evictable: Callable[[Node], bool], most_high: int) -> None:
        self._is_evictable = is_evictable
        self._most_high = most_high
        self._num_entries = 0
        self._heaps: dict[int, list[_Entry]] = {level: [] for level in LEVELS.values()}
        self.num_high = 0  # blocks of `high` nodes, leaves or not

    def touch(self, node: Node, now: int, level: int) -> None:
        """A request of this level was done with the node."""
        node.last_used = now
        if level > node.level:
            if level == HIGH:
                self.num_high += len(node.blocks)
            node.level = level

    def count_blocks(self, node: Node, count: int) -> None:
        """So many blocks were added to a node, or taken from it when negative."""
        if node.level == HIGH:
            self.num_high += count

    def offer(self, node: Node) -> None:
        """A node that may be evictable from now on."""
        if not node.is_queued and self._is_evictable(node):
            node.is_queued = True
            self._push(node)

    def pop(self) -> Node:
        """The leaf that goes first; raises RuntimeError when there is none."""
        low = self._top(_LOW)
        entries = [low] if low is not None else [self._top(NORMAL), self._top(HIGH)]
        found = [entry for entry in entries if entry is not None]
        if not found:
            raise RuntimeError("no leaf can be evicted")
        _, _, node = min(found) if self.num_high > self._most_high else found[0]
        heapq.heappop(self._heaps[node.level])
        node.is_queued = False
        return node

    def clear(self) -> None:
        for heap in self._heaps.values():
            heap.clear()
        self.num_high = 0

    def _push(self, node: Node) -> None:
        self._num_entries += 1
        heapq.heappush(self._heaps[node.level], (node.last_used, self._num_entries, node))

    def _top(self, level: int) -> _Entry | None:
        """The first entry of a level that says what is so, those before it having been put right."""
        heap = self._heaps[level]
        while heap:
            last_used, _, node = heap[0]
            if node.level == level and node.last_used == last_used and self._is_evictable(node):
                return heap[0]
            heapq.heappop(heap)
            if self._is_evictable(node):
                self._push(node)
            else:
                node.is_queued = False
        return None
