"""Free lists: which free block is used next, and so whose cached content is evicted."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tokenyard.errors import ConfigError


class FreeList(ABC):
    """The free ones of the blocks 1 .. num_blocks; a new list has them all, without content, in the order of their ids.

    A BlockPool calls it. A free block keeps its content until `pop` hands it out; `remove` takes it for that content.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block_id: object) -> bool: ...

    @abstractmethod
    def pop(self, count: int) -> list[int]:
        """Take the `count` blocks that go first; raises RuntimeError, having changed nothing, when fewer are free."""

    @abstractmethod
    def remove(self, block_id: int) -> None:
        """Take one free block out of its place."""

    @abstractmethod
    def append(self, block_ids: Iterable[int]) -> None:
        """These are free from now on; of equals, the first goes first."""

    def on_written(self, block_ids: Sequence[int]) -> None:  # noqa: B027 - a rule may not care
        """The content of these blocks became final, all at once; they are in the order of their tokens."""

    def on_cleared(self) -> None:  # noqa: B027 - the same
        """No block has content any more."""

    def _check(self, count: int) -> None:
        if count > len(self):
            raise RuntimeError(f"no free blocks: {count} asked for, {len(self)} free")


class LRUFreeList(FreeList):
    """Blocks are used again in the order in which they became free."""

    def __init__(self, num_blocks: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order

    def pop(self, count: int) -> list[int]:
        self._check(count)
        pop_item = self._order.popitem
        return [pop_item(last=False)[0] for _ in range(count)]

    def remove(self, block_id: int) -> None:
        del self._order[block_id]

    def append(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._order[block_id] = None


class FIFOFreeList(FreeList):
    """The block whose content was written first goes first, however often it was hit; before all, blocks without any.

    Of what was written at once, the end of a prefix goes before its start.
    """

    def __init__(self, num_blocks: int) -> None:
        self._empty = LRUFreeList(num_blocks)  # free, and without content
        self._num_written = 0
        self._ages: dict[int, int] = {}  # of blocks with content: its place in the order of writing
        self._cached: set[int] = set()  # free, and with content
        # What `remove` takes stays in the heap: `pop` passes over it, and `append` finds it in its place again.
        self._heap: list[tuple[int, int]] = []  # (age, block id)
        self._in_heap: set[int] = set()

    def __len__(self) -> int:
        return len(self._empty) + len(self._cached)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._empty or block_id in self._cached

    def pop(self, count: int) -> list[int]:
        self._check(count)
        num_empty = min(count, len(self._empty))
        return self._empty.pop(num_empty) + [self._pop_oldest() for _ in range(count - num_empty)]

    def remove(self, block_id: int) -> None:
        if block_id in self._empty:
            self._empty.remove(block_id)
        else:
            self._cached.remove(block_id)

    def append(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            age = self._ages.get(block_id)
            if age is None:
                self._empty.append((block_id,))
                continue
            self._cached.add(block_id)
            if block_id not in self._in_heap:
                self._in_heap.add(block_id)
                heapq.heappush(self._heap, (age, block_id))

    def on_written(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self._num_written += 1
            self._ages[block_id] = self._num_written

    def on_cleared(self) -> None:
        self._empty.append(block_id for _, block_id in sorted(self._heap) if block_id in self._cached)
        for cleared in (self._ages, self._cached, self._heap, self._in_heap):
            cleared.clear()

    def _pop_oldest(self) -> int:
        while True:
            _, block_id = heapq.heappop(self._heap)
            self._in_heap.remove(block_id)
            if block_id in self._cached:
                self._cached.remove(block_id)
                del self._ages[block_id]
                return block_id


EVICTION_RULES: Mapping[str, Callable[[int], FreeList]] = {"fifo": FIFOFreeList, "lru": LRUFreeList}
"""Values of `kv_cache.eviction`: what makes a free list for so many blocks."""


def make_free_list(eviction: str, num_blocks: int) -> FreeList:
    """All blocks free, under the rule of this name."""
    make = EVICTION_RULES.get(eviction)
    if make is None:
        raise ConfigError(f"unknown kv_cache.eviction '{eviction}'; available: {', '.join(sorted(EVICTION_RULES))}")
    return make(num_blocks)
