"""Which free block goes first, under each eviction rule."""

from __future__ import annotations

import pytest
from tokenyard.errors import ConfigError
from tokenyard.kv_cache.free_list import EVICTION_RULES, FIFOFreeList, FreeList, LRUFreeList, make_free_list

each_rule = pytest.mark.parametrize("eviction", sorted(EVICTION_RULES))


def rest(free: FreeList) -> list[int]:
    """What is left, in order."""
    return free.pop(len(free))


@each_rule
def test_u1_a_popped_block_is_gone(eviction: str) -> None:
    free = make_free_list(eviction, 5)
    assert free.pop(1) == [1]
    assert len(free) == 4
    assert 1 not in free
    assert 0 not in free


@each_rule
def test_u1_removing_a_middle_block_keeps_the_order_of_its_neighbours(eviction: str) -> None:
    free = make_free_list(eviction, 5)
    free.remove(3)
    assert (len(free), 3 in free) == (4, False)
    assert rest(free) == [1, 2, 4, 5]


@each_rule
def test_u1_a_block_that_becomes_free_goes_to_the_end(eviction: str) -> None:
    free = make_free_list(eviction, 5)
    free.append(free.pop(1))
    assert rest(free) == [2, 3, 4, 5, 1]


@each_rule
def test_u1_an_empty_list_has_nothing_to_pop_and_too_many_change_nothing(eviction: str) -> None:
    free = make_free_list(eviction, 2)
    with pytest.raises(RuntimeError, match="no free blocks: 3 asked for, 2 free"):
        free.pop(3)
    assert rest(free) == [1, 2]
    with pytest.raises(RuntimeError, match="no free blocks"):
        free.pop(1)


@each_rule
@pytest.mark.parametrize("count", [0, 1, 4])
def test_u2_popping_and_appending_many_keeps_order_and_count(eviction: str, count: int) -> None:
    free = make_free_list(eviction, 5)
    blocks = free.pop(count)
    assert (blocks, len(free)) == (list(range(1, count + 1)), 5 - count)
    free.append(reversed(blocks))
    assert len(free) == 5
    assert rest(free) == [*range(count + 1, 6), *range(count, 0, -1)]


def test_lru_goes_by_when_a_block_became_free_not_by_when_it_was_written() -> None:
    free = LRUFreeList(3)
    blocks = free.pop(3)
    free.on_written(blocks)
    free.append([2, 1, 3])
    free.remove(2)
    free.append([2])
    assert rest(free) == [1, 3, 2]


def test_fifo_goes_by_when_a_block_was_written_however_often_it_was_hit() -> None:
    free = FIFOFreeList(4)
    free.pop(3)
    free.on_written([2])
    free.on_written([1])
    free.on_written([3])
    free.append([3, 1, 2])
    for _ in range(3):
        free.remove(2)
        free.append([2])
    assert rest(free) == [4, 2, 1, 3]


def test_fifo_takes_the_end_before_the_start_of_what_was_written_at_once() -> None:
    free = FIFOFreeList(3)
    free.on_written(free.pop(3))
    free.append([1, 2, 3])
    assert rest(free) == [3, 2, 1]


def test_fifo_passes_over_what_was_hit() -> None:
    free = FIFOFreeList(3)
    free.on_written(free.pop(3))
    free.append([1, 2, 3])
    free.remove(3)
    assert rest(free) == [2, 1]
    free.append([3, 2])  # only 3 has content
    assert rest(free) == [2, 3]


def test_fifo_forgets_the_age_of_what_was_popped() -> None:
    free = FIFOFreeList(3)
    free.on_written(free.pop(3))
    free.append([1, 2, 3])
    assert free.pop(2) == [3, 2]
    free.append([2, 3])  # nothing was written to them since
    assert rest(free) == [2, 3, 1]


def test_fifo_after_clear_has_every_free_block_and_no_ages() -> None:
    free = FIFOFreeList(4)
    free.on_written(free.pop(3))
    free.append([1, 3])
    free.remove(3)
    free.on_cleared()
    assert [block in free for block in (1, 2, 3, 4)] == [True, False, False, True]
    free.append([2, 3])
    assert rest(free) == [4, 1, 2, 3]


def test_fifo_does_not_grow_with_the_number_of_hits() -> None:
    free = FIFOFreeList(1)
    free.on_written(free.pop(1))
    for _ in range(100):
        free.append([1])
        free.remove(1)
    assert len(free._heap) == 1


def test_an_unknown_rule_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.eviction 'random'; available: fifo, lru"):
        make_free_list("random", 4)
