"""BlockPool: counts, content, and blocks that hold the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenyard.interfaces import EvictionRule
from tokenyard.kv_cache import BlockPool, LRUEviction
from tokenyard.kv_cache.invariants import check_pool
from tokenyard_plugins.eviction_fifo import FIFOEviction

A, B = b"a" * 32, b"b" * 32


def test_a_block_that_is_released_twice_or_asked_for_in_vain_is_noticed() -> None:
    pool = BlockPool(2)
    blocks = pool.pop(2)
    with pytest.raises(RuntimeError, match="no free blocks"):
        pool.pop(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks[:1])


def test_a_block_is_published_once_and_only_while_it_is_held() -> None:
    pool = BlockPool(2)
    pool.publish(pool.pop(1), [A])
    with pytest.raises(RuntimeError, match="has a hash already"):
        pool.publish([1], [B])
    with pytest.raises(RuntimeError, match="block 2 is free"):
        pool.publish([2], [B])


def test_k8_a_block_that_is_handed_out_again_has_lost_its_content() -> None:
    pool = BlockPool(1)
    pool.publish(pool.pop(1), [A])
    pool.release([1])
    assert pool.find(A) == 1
    assert pool.pop(1) == [1]
    assert (pool.block_hash(1), pool.find(A), pool.cached_hashes()) == (None, None, frozenset())


def test_a_cached_block_that_is_taken_is_not_handed_out() -> None:
    pool = BlockPool(2)
    pool.publish(pool.pop(1), [A])
    pool.release([1])
    pool.take([1])
    assert (pool.num_free, pool.is_free(1), pool.ref_count(1)) == (1, False, 1)
    pool.take([1])
    pool.release([1])
    assert pool.ref_count(1) == 1
    check_pool(pool, {1: 1})


@pytest.mark.parametrize("evicted", [1, 2])
def test_k16_a_content_stays_while_one_of_its_blocks_lives(evicted: int) -> None:
    removed: list[bytes] = []
    pool = BlockPool(2, on_removed=removed.append)
    pool.pop(2)
    pool.publish([1], [A])
    pool.publish([2], [A])
    pool.release([evicted, 3 - evicted])
    assert pool.pop(1) == [evicted]
    assert (pool.find_all(A), removed) == ([3 - evicted], [])
    assert pool.pop(1) == [3 - evicted]
    assert (pool.find_all(A), removed) == ([], [A])
    check_pool(pool, {1: 1, 2: 1})


def test_k16_evicting_a_block_without_content_changes_nothing_else() -> None:
    removed: list[bytes] = []
    pool = BlockPool(2, on_removed=removed.append)
    pool.publish(pool.pop(1), [A])
    pool.release(pool.pop(1))
    assert pool.pop(1) == [2]
    assert (pool.find(A), removed) == (1, [])


def test_k17_a_hash_is_found_while_any_block_has_it_and_gone_with_the_last() -> None:
    pool = BlockPool(3)
    assert pool.find(A) is None
    pool.pop(3)
    pool.publish([1, 3], [A, B])
    pool.publish([2], [A])
    assert sorted(pool.find_all(A)) == [1, 2]
    pool.release([1])
    pool.pop(1)
    assert (pool.find(A), pool.find(B)) == (2, 3)
    pool.release([2])
    pool.pop(1)
    assert (pool.find(A), pool.find(B)) == (None, 3)


@pytest.mark.parametrize("rule", [LRUEviction, FIFOEviction])
def test_k15_clear_forgets_all_content_and_says_whether_there_was_any(rule: Callable[[int], EvictionRule]) -> None:
    pool = BlockPool(4, make_eviction=rule)
    assert pool.clear() is False
    pool.publish(pool.pop(3), [A, B, A])
    pool.release([1, 3, 2])
    assert pool.clear() is True
    assert (pool.cached_hashes(), pool.find_all(A)) == (frozenset(), [])
    assert [pool.block_hash(block) for block in (1, 2, 3, 4)] == [None] * 4
    pool.publish(pool.pop(1), [A])
    assert pool.find_all(A) == [4]
    check_pool(pool, {4: 1})


def test_fifo_after_clear_goes_by_what_was_written_since() -> None:
    pool = BlockPool(2, make_eviction=FIFOEviction)
    pool.pop(2)
    pool.publish([1], [A])
    pool.publish([2], [B])
    pool.release([1, 2])
    pool.clear()
    pool.publish(pool.pop(1), [A])  # block 1 again, and block 2 holds nothing
    pool.release([1])
    assert pool.pop(2) == [2, 1]


def test_the_invariant_check_names_what_is_wrong() -> None:
    pool = BlockPool(2)
    pool.publish(pool.pop(1), [A])
    with pytest.raises(RuntimeError, match="block 1: reference count 1, in 0 table entries, free: False"):
        check_pool(pool, {})
    pool._hashes[1] = B
    with pytest.raises(RuntimeError, match="cannot be found"):
        check_pool(pool, {1: 1})
    pool._hashes[1] = None
    with pytest.raises(RuntimeError, match="not its own"):
        check_pool(pool, {1: 1})
