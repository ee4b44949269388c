"""RetentionEviction: an eviction rule for each retention level, so that content worth less goes first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.kv_cache.eviction import EmptyFirst, MakeEviction
from tokenyard.request import RETENTION_LEVELS, Retention

if TYPE_CHECKING:
    from tokenyard.interfaces.eviction import EvictionRule
    from tokenyard.interfaces.kv_cache import KVRequest

LEVELS: Mapping[Retention, int] = {name: level for level, name in enumerate(RETENTION_LEVELS, start=1)}
"""Levels as numbers; what is evicted first is lowest."""

_NO_CONTENT = 0
NORMAL, HIGH = LEVELS["normal"], LEVELS["high"]


def level_of(request: KVRequest) -> int:
    """The level of what a request writes and hits."""
    # A scheduler written for plugin API 1.5 has requests without it.
    retention: Retention = getattr(request, "retention", "normal")
    return LEVELS[retention]


class RetentionEviction(EmptyFirst):
    """Free blocks without content go first, then `low`, `normal` and `high`, each by a rule of its own.

    A block has the highest level of the requests that wrote or hit its content. At most `most_high` blocks are `high`,
    held ones included: for more, those that their rule would evict first become `normal`, and what finds no room even
    so counts as `normal`. A block whose level changes starts anew under its new rule, as if it were just written.

    It takes over from a rule that is in use, whose content is all `normal`.
    """

    def __init__(
        self, num_blocks: int, make_eviction: MakeEviction, normal: EvictionRule, cached: Sequence[int], most_high: int
    ) -> None:
        """`cached`: the blocks that have content, free or held."""
        super().__init__(num_blocks)
        self._rules = {
            level: normal if level == NORMAL else _without_blocks(make_eviction(num_blocks), num_blocks)
            for level in LEVELS.values()
        }
        self._levels = bytearray(num_blocks + 1)
        self._most_high = most_high
        self.num_high = 0
        for block_id in cached:
            self._levels[block_id] = NORMAL
        num_empty = len(normal) - sum(block_id in normal for block_id in cached)
        self._line, self._members = deque(normal.pop(num_empty)), None
        self._with_content.update(cached)

    # As a rule

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._rules.values()))

    def holds(self, block_id: int) -> bool:
        return any(block_id in rule for rule in self._rules.values())

    def insert(self, block_ids: Sequence[int]) -> None:
        for level, members in self._by_level(block_ids):
            self._rules[level].append(members)

    def take(self, block_id: int) -> None:
        self._rules[self._levels[block_id]].remove(block_id)

    def evict(self, count: int) -> list[int]:
        block_ids: list[int] = []
        for rule in self._rules.values():
            block_ids += rule.pop(min(count - len(block_ids), len(rule)))
        self._forget(block_ids)
        return block_ids

    def on_written(self, block_ids: Sequence[int]) -> None:
        self.write(block_ids, NORMAL)

    def on_hit(self, block_ids: Sequence[int]) -> None:
        self.hit(block_ids, NORMAL)

    def on_cleared(self) -> None:
        super().on_cleared()
        for rule in self._rules.values():
            rule.on_cleared()
        self._forget(range(1, len(self._levels)))

    # With levels

    def write(self, block_ids: Sequence[int], level: int) -> int:
        """`on_written` for content of this level; returns the level of the last block."""
        super().on_written(block_ids)
        self._forget(block_ids)
        return self._assign(block_ids, level)

    def hit(self, block_ids: Sequence[int], level: int) -> int:
        """`on_hit` by a request of this level; returns the level that more blocks of the request can have."""
        raised = [block_id for block_id in block_ids if self._levels[block_id] < level]
        if raised:
            level = self._assign(raised, level)
        for own_level, members in self._by_level(block_ids):
            self._rules[own_level].on_hit(members)
        return level

    def _assign(self, block_ids: Sequence[int], level: int) -> int:
        """Give blocks that nobody else has a level for the first time, or a higher one; returns that of the last."""
        if level < HIGH:
            self._set_level(block_ids, level)
            return level
        self._demote(self.num_high + len(block_ids) - self._most_high)
        num_granted = max(0, min(len(block_ids), self._most_high - self.num_high))
        self.num_high += num_granted
        self._set_level(block_ids[:num_granted], HIGH)
        self._set_level([block for block in block_ids[num_granted:] if self._levels[block] < NORMAL], NORMAL)
        return HIGH if num_granted == len(block_ids) else NORMAL

    def _demote(self, count: int) -> None:
        """Make `normal` of so many free `high` blocks, or of all there are."""
        high, normal = self._rules[HIGH], self._rules[NORMAL]
        demoted = high.pop(max(0, min(count, len(high))))
        self.num_high -= len(demoted)
        self._set_level(demoted[::-1], NORMAL)  # what goes first is the end of a prefix
        normal.append(demoted)

    def _set_level(self, block_ids: Sequence[int], level: int) -> None:
        for block_id in block_ids:
            self._levels[block_id] = level
        if block_ids:
            self._rules[level].on_written(block_ids)

    def _forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.num_high -= self._levels[block_id] == HIGH
            self._levels[block_id] = _NO_CONTENT

    def _by_level(self, block_ids: Sequence[int]) -> Iterable[tuple[int, list[int]]]:
        levels = self._levels
        for level in sorted({levels[block_id] for block_id in block_ids}):
            yield level, [block_id for block_id in block_ids if levels[block_id] == level]


def _without_blocks(rule: EvictionRule, num_blocks: int) -> EvictionRule:
    rule.pop(num_blocks)
    return rule
