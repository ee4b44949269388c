"""Eviction rules by name, and a plain, slow model of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from tokenyard.interfaces import EvictionRule
from tokenyard.kv_cache import LRUEviction
from tokenyard_plugins.eviction_fifo import FIFOEviction
from tokenyard_plugins.eviction_lfu import LFUEviction
from tokenyard_plugins.eviction_slru import SLRUEviction


class SlowRule:
    """Least recently used: lists, searched from the start each time."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(1, num_blocks + 1))  # in the order of becoming free
        self.contents: set[int] = set()

    def order(self) -> list[int]:
        """Free blocks, the next to go first."""
        return [one for one in self.free if one not in self.contents] + self.cached_order()

    def cached_order(self) -> list[int]:
        return [one for one in self.free if one in self.contents]

    def pop(self, count: int) -> list[int]:
        victims = self.order()[:count]
        for one in victims:
            if one in self.contents:
                self.lose(one)
            self.free.remove(one)
            self.contents.discard(one)
        return victims

    def remove(self, block: int) -> None:
        self.free.remove(block)

    def append(self, blocks: Iterable[int]) -> None:
        self.free += blocks

    def on_written(self, blocks: Sequence[int]) -> None:
        self.contents |= set(blocks)

    def on_hit(self, blocks: Sequence[int]) -> None:
        pass

    def on_cleared(self) -> None:
        self.free = self.order()
        self.contents.clear()

    def lose(self, block: int) -> None:
        """The content of a block is evicted."""


class SlowFIFO(SlowRule):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.writes: list[int] = []  # blocks, in the order of writing

    def on_written(self, blocks: Sequence[int]) -> None:
        super().on_written(blocks)
        self.writes += reversed(blocks)

    def cached_order(self) -> list[int]:
        last_write = {one: index for index, one in enumerate(self.writes)}
        return sorted(super().cached_order(), key=lambda one: last_write[one])


class SlowLFU(SlowRule):
    def __init__(self, num_blocks: int, *, ageing: bool) -> None:
        super().__init__(num_blocks)
        self.ageing = ageing
        self.history: dict[int, list[int]] = {}  # the age of the cache at the write and at each hit
        self.age = 0

    def rank(self, block: int) -> int:
        ages = self.history[block]
        return ages[-1] + len(ages) - 1

    def cached_order(self) -> list[int]:
        return sorted(super().cached_order(), key=self.rank)

    def on_written(self, blocks: Sequence[int]) -> None:
        super().on_written(blocks)
        self.history.update({one: [self.age] for one in blocks})

    def on_hit(self, blocks: Sequence[int]) -> None:
        for one in blocks:
            self.history[one].append(self.age)

    def lose(self, block: int) -> None:
        if self.ageing:
            self.age = max(self.age, self.rank(block))


class SlowSLRU(SlowRule):
    def __init__(self, num_blocks: int, *, protected_share: float) -> None:
        super().__init__(num_blocks)
        self.most = int(num_blocks * protected_share)
        self.hit: set[int] = set()

    def protected(self) -> list[int]:
        return [one for one in super().cached_order() if one in self.hit]

    def cached_order(self) -> list[int]:
        return [one for one in super().cached_order() if one not in self.hit] + self.protected()

    def append(self, blocks: Iterable[int]) -> None:
        self.free += blocks
        for one in self.protected()[: max(0, len(self.protected()) - self.most)]:
            self.hit.remove(one)
            self.free.remove(one)
            self.free.append(one)

    def on_written(self, blocks: Sequence[int]) -> None:
        super().on_written(blocks)
        self.hit -= set(blocks)

    def on_hit(self, blocks: Sequence[int]) -> None:
        self.hit |= set(blocks)


RULES: Mapping[str, tuple[Callable[[int], EvictionRule], Callable[[int], SlowRule]]] = {
    "lru": (LRUEviction, SlowRule),
    "fifo": (FIFOEviction, SlowFIFO),
    "lfu": (partial(LFUEviction, ageing=True), partial(SlowLFU, ageing=True)),
    "lfu without ageing": (partial(LFUEviction, ageing=False), partial(SlowLFU, ageing=False)),
    "slru": (partial(SLRUEviction, protected_share=0.5), partial(SlowSLRU, protected_share=0.5)),
}
"""By name: what makes the rule, and its model."""


class SlowLevels:
    """Retention levels over one of these: see RetentionEviction."""

    def __init__(self, num_blocks: int, make_rule: Callable[[int], SlowRule], most_high: int) -> None:
        self.rules = {level: make_rule(num_blocks) for level in (1, 2, 3)}
        self.empty = list(self.rules[2].free)
        for rule in self.rules.values():
            rule.free.clear()
        self.levels: dict[int, int] = {}  # of blocks with content
        self.most_high = most_high

    def order(self) -> list[int]:
        return [*self.empty, *(one for rule in self.rules.values() for one in rule.order())]

    def pop(self, count: int) -> list[int]:
        victims = self.order()[:count]
        for one in victims:
            if one in self.empty:
                self.empty.remove(one)
            else:
                assert self.rules[self.levels.pop(one)].pop(1) == [one]
        return victims

    def remove(self, block: int) -> None:
        self.rules[self.levels[block]].remove(block)

    def append(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self.empty += [one for one in blocks if one not in self.levels]
        for level, rule in self.rules.items():
            rule.append([one for one in blocks if self.levels.get(one) == level])

    def write(self, blocks: Sequence[int], level: int) -> None:
        for one in blocks:
            self.levels.pop(one, None)
        self._assign(blocks, level)

    def hit(self, blocks: Sequence[int], level: int) -> None:
        self._assign([one for one in blocks if self.levels[one] < level], level)
        for own, rule in self.rules.items():
            rule.on_hit([one for one in blocks if self.levels[one] == own])

    def num_high(self) -> int:
        return sum(level == 3 for level in self.levels.values())

    def _assign(self, blocks: Sequence[int], level: int) -> None:
        if level == 3:
            excess = self.num_high() + len(blocks) - self.most_high
            demoted = self.rules[3].pop(max(0, min(excess, len(self.rules[3].order()))))
            self._set(list(reversed(demoted)), 2)
            self.rules[2].append(demoted)
            room = max(0, self.most_high - self.num_high())
            self._set(blocks[:room], 3)
            blocks, level = [one for one in blocks[room:] if self.levels.get(one, 0) < 2], 2
        self._set(blocks, level)

    def _set(self, blocks: Sequence[int], level: int) -> None:
        self.levels.update(dict.fromkeys(blocks, level))
        if blocks:
            self.rules[level].on_written(blocks)
