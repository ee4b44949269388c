"""What eviction rules have in common, and the rule that needs no plugin: least recently used."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.config import KVCacheConfig
from tokenyard.errors import ConfigError
from tokenyard.interfaces.eviction import EvictionRule

if TYPE_CHECKING:
    from tokenyard.interfaces.kv_cache import KVCacheManagerContext

MakeEviction: TypeAlias = Callable[[int], EvictionRule]
"""Makes a rule for the blocks 1 .. num_blocks, all of them free and without content."""

_FEWEST_STALE = 64


class EmptyFirst(EvictionRule):
    """A rule that only has to put blocks with content in order: those without go first, as they became free."""

    def __init__(self, num_blocks: int) -> None:
        self._line = deque(range(1, num_blocks + 1))  # free and without content, in order
        self._members: frozenset[int] | None = None  # the same, for who asks; None = the line has changed since
        self._with_content: set[int] = set()  # with content, free or held

    # What a rule of this kind does

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """How many blocks with content are free."""

    @abstractmethod
    def holds(self, block_id: int) -> bool:
        """Whether this block with content is free."""

    @abstractmethod
    def insert(self, block_ids: Sequence[int]) -> None:
        """These, with content, are free from now on; of equals, the first goes first."""

    @abstractmethod
    def take(self, block_id: int) -> None:
        """This one, with content, is free no longer."""

    @abstractmethod
    def evict(self, count: int) -> list[int]:
        """Take the `count` blocks with content that go first; there are as many. They lose it."""

    # What all of them do

    def __len__(self) -> int:
        return len(self._line) + self.num_cached

    def __contains__(self, block_id: object) -> bool:
        if self._members is None:
            self._members = frozenset(self._line)
        return isinstance(block_id, int) and (block_id in self._members or self.holds(block_id))

    def pop(self, count: int) -> list[int]:
        line, self._members = self._line, None
        num_cached = count - len(line)
        if num_cached > self.num_cached:
            raise RuntimeError(f"no free blocks: {count} asked for, {len(self)} free")
        if num_cached > 0:
            evicted = self.evict(num_cached)
            self._with_content.difference_update(evicted)
            block_ids = [*line, *evicted]
            line.clear()
            return block_ids
        pop_first = line.popleft
        return [pop_first() for _ in range(count)]

    def remove(self, block_id: int) -> None:
        if block_id in self._with_content:
            self.take(block_id)
        else:  # slow, and rare: nobody looks for a block without content
            self._line.remove(block_id)
            self._members = None

    def append(self, block_ids: Iterable[int]) -> None:
        written, self._members = self._with_content, None
        if not written:  # without a prefix cache, always
            self._line.extend(block_ids)
            return
        cached: list[int] = []
        for block_id in block_ids:
            (cached if block_id in written else self._line).append(block_id)
        self.insert(cached)

    def on_written(self, block_ids: Sequence[int]) -> None:
        self._with_content.update(block_ids)

    def on_cleared(self) -> None:
        self._line.extend(self.evict(self.num_cached))
        self._members = None
        self._with_content.clear()


class LRUEviction(EmptyFirst):
    """Content goes in the order in which its blocks became free: what was used longest ago goes first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._order: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._order)

    def holds(self, block_id: int) -> bool:
        return block_id in self._order

    def insert(self, block_ids: Sequence[int]) -> None:
        order = self._order
        for block_id in block_ids:  # three times as fast as `update`
            order[block_id] = None

    def take(self, block_id: int) -> None:
        del self._order[block_id]

    def evict(self, count: int) -> list[int]:
        pop_item = self._order.popitem
        return [pop_item(last=False)[0] for _ in range(count)]


class RankedEviction(EmptyFirst):
    """Content goes by a number that its rule gives it, lowest first; of equals, what became free first.

    The number is asked for when a block becomes free, and holds until it is taken. An operation costs O(log n).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_inserted = 0
        self._current: dict[int, int] = {}  # of free blocks with content: the number of their insertion
        # What is taken stays in the heap until it comes up, or too much of the heap is such.
        self._heap: list[tuple[int, int, int]] = []  # (rank, number of the insertion, block id)

    @abstractmethod
    def rank(self, block_id: int) -> int:
        """The number of a block with content that becomes free."""

    def on_evicted(self, block_id: int, rank: int) -> None:
        """The content of a block is lost; it had this rank."""

    @property
    def num_cached(self) -> int:
        return len(self._current)

    def holds(self, block_id: int) -> bool:
        return block_id in self._current

    def insert(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._num_inserted += 1
            self._current[block_id] = self._num_inserted
            heapq.heappush(self._heap, (self.rank(block_id), self._num_inserted, block_id))

    def take(self, block_id: int) -> None:
        del self._current[block_id]
        if len(self._heap) > 2 * len(self._current) + _FEWEST_STALE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def evict(self, count: int) -> list[int]:
        return [self._evict_lowest() for _ in range(count)]

    def _is_current(self, entry: tuple[int, int, int]) -> bool:
        return self._current.get(entry[2]) == entry[1]

    def _evict_lowest(self) -> int:
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                rank, _, block_id = entry
                del self._current[block_id]
                self.on_evicted(block_id, rank)
                return block_id


def eviction_maker(context: KVCacheManagerContext) -> MakeEviction:
    """What makes the rule that a manager's config names; least recently used where the context makes none."""
    if context.make_eviction is not None:
        return context.make_eviction
    if context.config.eviction != KVCacheConfig().eviction:
        raise ConfigError(
            f"kv_cache.eviction='{context.config.eviction}' is a plugin's, and this context makes no plugins: give it "
            "make_eviction, or leave kv_cache.eviction out"
        )
    return LRUEviction
