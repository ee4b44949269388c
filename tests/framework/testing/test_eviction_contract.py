"""EvictionContract: on the rules that ship, and on rules that break it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from random import Random

import pytest
from tokenyard import ComponentDescriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces import EvictionContext, EvictionRule
from tokenyard.kv_cache import EmptyFirst, LRUEviction, RankedEviction
from tokenyard.testing import ContractViolation, EvictionContract


class TestLRU(EvictionContract):
    overrides = ("kv_cache.eviction=lru",)


class TestFIFO(EvictionContract):
    overrides = ("kv_cache.eviction=fifo",)


class TestLFU(EvictionContract):
    overrides = ("kv_cache.eviction=lfu",)


class TestLFUWithoutAgeing(EvictionContract):
    overrides = ("kv_cache.eviction={name: lfu, ageing: false}",)


class TestSLRU(EvictionContract):
    overrides = ("kv_cache.eviction={name: slru, protected_share: 0.5}",)


# Planted


class Backwards(LRUEviction):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.append(list(reversed(super().pop(num_blocks))))


class Leaks(LRUEviction):
    """Of many that become free at once, the last is forgotten."""

    def append(self, block_ids: Iterable[int]) -> None:
        super().append([*block_ids][:2])


class ContentFirst(LRUEviction):
    def pop(self, count: int) -> list[int]:
        if count > len(self):
            return super().pop(count)
        found = self.evict(min(count, self.num_cached))
        return found + super().pop(count - len(found))


class HandsOutWhatItHas(LRUEviction):
    def pop(self, count: int) -> list[int]:
        return super().pop(min(count, len(self)))


class Forgets(LRUEviction):
    """A refusal takes a block."""

    def pop(self, count: int) -> list[int]:
        if count > len(self):
            super().pop(1)
        return super().pop(count)


class AtRandom(EmptyFirst):
    seed = 0

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        AtRandom.seed += 1
        self._draw = Random(AtRandom.seed)
        self._cached: list[int] = []

    num_cached = property(lambda self: len(self._cached))

    def holds(self, block_id: int) -> bool:
        return block_id in self._cached

    def insert(self, block_ids: Sequence[int]) -> None:
        self._cached += block_ids

    def take(self, block_id: int) -> None:
        self._cached.remove(block_id)

    def evict(self, count: int) -> list[int]:
        found = self._draw.sample(self._cached, count)
        self._cached = [one for one in self._cached if one not in found]
        return found


class SortsWhatItPops(LRUEviction):
    def evict(self, count: int) -> list[int]:
        return sorted(super().evict(count), reverse=True)


class ByTheClock(RankedEviction):
    def rank(self, block_id: int) -> int:
        return time.monotonic_ns()


class Trips(LRUEviction):
    def on_hit(self, block_ids: Sequence[int]) -> None:
        raise KeyError(block_ids[0])


PLANTED = [
    (Backwards, "test_a_new_rule_has_every_block_in_order", "eviction.starts_full"),
    (Leaks, "test_blocks_are_neither_lost_nor_handed_out_twice", "eviction.conservation"),
    (ContentFirst, "test_blocks_without_content_go_first", "eviction.empty_first"),
    (HandsOutWhatItHas, "test_too_many_are_refused", "eviction.too_many"),
    (Forgets, "test_too_many_are_refused", "eviction.too_many"),
    (AtRandom, "test_the_same_calls_evict_the_same", "eviction.deterministic"),
    (SortsWhatItPops, "test_many_at_once_are_the_same_as_one_after_the_other", "eviction.one_order"),
    (ByTheClock, "test_it_reads_no_clock", "eviction.no_clock"),
    (Trips, "test_blocks_are_neither_lost_nor_handed_out_twice", "eviction.raises"),
]


def suite_for(make: type[EvictionRule]) -> EvictionContract:
    class Suite(EvictionContract):
        def descriptors(self) -> Sequence[ComponentDescriptor[object]]:
            def factory(options: object, context: EvictionContext) -> EvictionRule:
                return make(context.num_blocks)  # type: ignore[call-arg]

            return [
                ComponentDescriptor(component_kind="eviction", name="planted", api_version=(1, 7), factory=factory)  # type: ignore[arg-type]
            ]

    return Suite()


@pytest.mark.parametrize(("make", "test", "rule"), PLANTED, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_rule_is_caught_by_the_rule_that_it_breaks(make: type[EvictionRule], test: str, rule: str) -> None:
    with pytest.raises(ContractViolation) as raised:
        getattr(suite_for(make), test)()
    assert raised.value.rule == rule


def test_a_suite_that_names_no_rule_is_refused() -> None:
    class Suite(EvictionContract):
        pass

    with pytest.raises(ConfigError, match=r"Suite does not say which eviction it tests: set overrides = \['kv_cache"):
        Suite().test_it_reads_no_clock()
