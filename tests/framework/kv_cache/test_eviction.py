"""Which free block goes first: what all rules keep, and least recently used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from eviction_models import RULES
from tokenyard.config import KVCacheConfig
from tokenyard.errors import ConfigError
from tokenyard.interfaces import EvictionRule
from tokenyard.interfaces.kv_cache import KVCacheManagerContext
from tokenyard.kv_cache import LRUEviction, eviction_maker

MakeRule = Callable[[int], EvictionRule]

each_rule = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, (make, _) in RULES.items()])


def rest(free: EvictionRule) -> list[int]:
    """What is left, in order."""
    return free.pop(len(free))


@each_rule
def test_u1_a_popped_block_is_gone(make: MakeRule) -> None:
    free = make(5)
    assert free.pop(1) == [1]
    assert len(free) == 4
    assert 1 not in free
    assert 0 not in free


@each_rule
@pytest.mark.parametrize("has_content", [False, True])
def test_u1_removing_a_middle_block_keeps_the_order_of_its_neighbours(make: MakeRule, has_content: bool) -> None:
    free = make(5)
    if has_content:
        free.on_written(free.pop(5)[::-1])
        free.append([1, 2, 3, 4, 5])
    free.remove(3)
    assert (len(free), 3 in free, 2 in free) == (4, False, True)
    assert rest(free) == [1, 2, 4, 5]


@each_rule
def test_u1_a_block_that_becomes_free_goes_to_the_end(make: MakeRule) -> None:
    free = make(5)
    free.append(free.pop(1))
    assert rest(free) == [2, 3, 4, 5, 1]


@each_rule
def test_u1_an_empty_list_has_nothing_to_pop_and_too_many_change_nothing(make: MakeRule) -> None:
    free = make(3)
    free.on_written(free.pop(1))
    free.append([1])
    with pytest.raises(RuntimeError, match="no free blocks: 4 asked for, 3 free"):
        free.pop(4)
    assert rest(free) == [2, 3, 1]
    with pytest.raises(RuntimeError, match="no free blocks"):
        free.pop(1)


@each_rule
@pytest.mark.parametrize("count", [0, 1, 4])
def test_u2_popping_and_appending_many_keeps_order_and_count(make: MakeRule, count: int) -> None:
    free = make(5)
    blocks = free.pop(count)
    assert (blocks, len(free)) == (list(range(1, count + 1)), 5 - count)
    free.append(reversed(blocks))
    assert len(free) == 5
    assert rest(free) == [*range(count + 1, 6), *range(count, 0, -1)]


@each_rule
def test_blocks_without_content_go_before_all_others(make: MakeRule) -> None:
    free = make(4)
    free.on_written(free.pop(2))
    free.append([1, 2])
    free.append(free.pop(2))
    assert sorted(free.pop(2)) == [3, 4]


@each_rule
def test_content_that_is_written_again_without_having_been_popped_starts_anew(make: MakeRule) -> None:
    free = make(2)
    free.on_written(free.pop(1))
    free.append([1])
    free.remove(1)
    free.on_hit([1])  # it has a past that would have kept it
    free.on_written(free.pop(1))
    free.on_written([1])
    free.append([1, 2])
    assert rest(free) == ([2, 1] if make is RULES["fifo"][0] else [1, 2])


@each_rule
def test_after_clear_no_block_has_content_and_the_order_is_as_before(make: MakeRule) -> None:
    free = make(4)
    free.on_written([*free.pop(3)][::-1])
    free.append([1, 3])
    free.on_cleared()
    assert [block in free for block in (1, 2, 3, 4)] == [True, False, True, True]
    free.append([2])
    assert rest(free) == [4, 1, 3, 2] if make is not RULES["fifo"][0] else [4, 3, 1, 2]


def test_lru_goes_by_when_a_block_became_free_not_by_when_it_was_written() -> None:
    free = LRUEviction(3)
    free.on_written(free.pop(3))
    free.append([2, 1, 3])
    free.remove(2)
    free.append([2])
    assert rest(free) == [1, 3, 2]


def test_a_context_without_plugins_gives_the_default_rule_and_no_other() -> None:
    assert eviction_maker(KVCacheManagerContext(config=KVCacheConfig(), num_blocks=4)) is LRUEviction
    with pytest.raises(ConfigError, match=r"kv_cache\.eviction='fifo' is a plugin's"):
        eviction_maker(KVCacheManagerContext(config=KVCacheConfig(eviction="fifo"), num_blocks=4))
    fifo = RULES["fifo"][0]
    context = KVCacheManagerContext(config=KVCacheConfig(eviction="fifo"), num_blocks=4, make_eviction=fifo)
    assert eviction_maker(context) is fifo
