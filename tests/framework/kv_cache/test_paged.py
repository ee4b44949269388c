"""PagedKVCacheManager with one KV group: tables, hits, eviction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kv_requests import FakeRequest, decode, ids, start, table
from tokenyard.interfaces import EvictionRule, Hit
from tokenyard.interfaces.kv_cache import ExtraKey
from tokenyard.kv_cache import LRUEviction, PagedKVCacheManager
from tokenyard_plugins.eviction_fifo import FIFOEviction

both_rules = pytest.mark.parametrize("rule", [LRUEviction, FIFOEviction])


# Tables and hits


def test_k1_a_cold_prompt_takes_whole_blocks_and_hashes_the_full_ones() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=16)
    assert start(manager, FakeRequest("a", list(range(55)))) == (0, [1, 2, 3, 4])
    assert [manager.pool.block_hash(block) is not None for block in (1, 2, 3, 4)] == [True, True, True, False]
    assert [manager.pool.ref_count(block) for block in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_k2_a_second_request_shares_the_prefix_blocks() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=16)
    start(manager, FakeRequest("a", list(range(55))))
    assert start(manager, FakeRequest("b", [*range(48), *range(100, 107)])) == (48, [1, 2, 3, 5])
    assert [manager.pool.ref_count(block) for block in (1, 2, 3)] == [2, 2, 2]
    assert manager.usage.num_free_blocks == 5


def test_k5_a_request_that_must_compute_its_prompt_reads_nothing_but_fills_the_cache() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=16)
    start(manager, FakeRequest("a", list(range(40))))
    skipping = FakeRequest("b", list(range(40)), skip_prefix_cache=True)
    assert start(manager, skipping) == (0, [4, 5, 6])
    assert manager.pool.block_hash(1) == manager.pool.block_hash(4)
    assert start(manager, FakeRequest("c", list(range(40))))[0] == 32


def test_k6_decoding_takes_a_block_only_when_it_crosses_an_edge_and_hashes_what_it_completes() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=16)
    request = FakeRequest("a", list(range(60)))
    assert start(manager, request) == (0, [1, 2, 3, 4])
    assert decode(manager, request, 70, 71, 72) == []
    assert manager.pool.block_hash(4) is None
    assert decode(manager, request, 73) == []
    assert manager.pool.block_hash(4) is not None
    assert decode(manager, request, 74) == [5]
    assert manager.lookup(FakeRequest("b", [*range(60), 70, 71, 72, 73, 1])).tokens == 64


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_kv_07_blocks_are_taken_exactly_when_the_first_token_of_one_is_written(length: int, caching: bool) -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=16, enable_prefix_caching=caching)
    request = FakeRequest("a", list(range(length)))
    assert len(start(manager, request)[1]) == -(-length // 16)
    for num_tokens in range(length + 1, length + 21):
        assert len(decode(manager, request, num_tokens)) == (num_tokens % 16 == 1)
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == (8, 8)


def test_k12_only_full_blocks_are_registered_from_wherever_the_last_commit_ended() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=4)
    request = FakeRequest("a", list(range(14)))
    assert manager.allocate(request, 14, manager.lookup(request)) is not None
    for num_computed, num_cached in ((3, 0), (10, 2), (11, 2), (14, 3), (9, 3)):
        manager.commit(request, num_computed)
        manager.check_invariants()
        assert len(manager.inspect().cached_hashes) == num_cached


@pytest.mark.parametrize("length", [16, 32, 48])
def test_k14_kv_01_something_is_always_left_to_compute(length: int) -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=16)
    assert start(manager, FakeRequest("a", list(range(length))))[0] == 0
    assert start(manager, FakeRequest("b", list(range(length))))[0] == length - 16
    assert manager.lookup(FakeRequest("c", [*range(length), 1])).tokens == length
    with pytest.raises(RuntimeError, match="look the request up again"):
        manager.allocate(FakeRequest("d", list(range(length))), length, Hit(length))


def test_kv_02_recomputing_the_last_block_keeps_the_chain() -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=16)
    hits: list[int] = []
    for length in (48, 48, 48, 64):
        request = FakeRequest(f"r{len(hits)}", list(range(length)))
        hits.append(start(manager, request)[0])
        manager.free(request)
    assert hits == [0, 32, 32, 48]


def test_k22_a_follow_up_hits_prompt_and_generated_tokens() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=4)
    request = FakeRequest("a", list(range(6)))
    start(manager, request)
    decode(manager, request, *range(50, 56))
    manager.free(request)
    assert manager.lookup(FakeRequest("b", [*request.tokens, 99])).tokens == 12


def test_block_size_one_is_legal() -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=1)
    start(manager, FakeRequest("a", [5, 6, 7]))
    assert start(manager, FakeRequest("b", [5, 6, 7, 8]))[0] == 3
    assert start(manager, FakeRequest("c", [5, 6, 7]))[0] == 2


def test_u6_lookahead_takes_blocks_for_tokens_that_may_come() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(3)))
    allocation = manager.allocate(request, 3, Hit(0), num_lookahead=2)
    assert (ids(allocation), allocation and allocation.valid_until_tokens) == ([1, 2], 8)
    assert ids(manager.allocate(request, 8)) == []
    assert manager.allocate(request, 15, num_lookahead=2) is None


def test_u6_lookahead_comes_on_top_of_blocks_that_are_cached() -> None:
    manager = PagedKVCacheManager(num_blocks=6, block_size=4)
    start(manager, FakeRequest("a", list(range(9))))
    request = FakeRequest("b", list(range(11)))
    assert ids(manager.allocate(request, 11, manager.lookup(request), num_lookahead=2)) == [1, 2, 4, 5]
    manager.check_invariants()


# Eviction


def test_k7_after_freeing_the_head_of_the_free_list_is_what_was_never_used() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=16)
    first, second = FakeRequest("a", list(range(90))), FakeRequest("b", list(range(1000, 1048)))
    start(manager, first)
    start(manager, second)
    manager.free(first)
    manager.free(second)
    assert start(manager, FakeRequest("c", [*range(32), *range(500, 510)])) == (32, [1, 2, 10])
    assert start(manager, FakeRequest("d", list(range(600, 690)))) == (0, [6, 5, 4, 3, 9, 8])


def test_k7_of_one_request_the_last_block_is_reused_first() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    request = FakeRequest("a", list(range(12)))
    start(manager, request)
    manager.free(request)
    assert start(manager, FakeRequest("b", [900, 901]))[1] == [3]
    assert manager.lookup(FakeRequest("c", list(range(12)))).tokens == 8


@both_rules
def test_lru_keeps_what_was_hit_lately_and_fifo_what_was_written_lately(rule: Callable[[int], EvictionRule]) -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4, make_eviction=rule)
    old, new = FakeRequest("old", [1] * 4), FakeRequest("new", [2] * 4)
    for request in (old, new):
        start(manager, request)
        manager.free(request)
    again = FakeRequest("again", [*old.tokens, 7])
    assert start(manager, again)[0] == 4
    manager.free(again)
    start(manager, FakeRequest("other", [3] * 9))
    assert manager.lookup(FakeRequest("x", [*old.tokens, 9])).tokens == (4 if rule is LRUEviction else 0)
    assert manager.lookup(FakeRequest("y", [*new.tokens, 9])).tokens == (0 if rule is LRUEviction else 4)


@both_rules
def test_k8_a_reused_block_has_lost_its_hash(rule: Callable[[int], EvictionRule]) -> None:
    manager = PagedKVCacheManager(num_blocks=2, block_size=4, make_eviction=rule)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    manager.free(request)
    assert start(manager, FakeRequest("b", list(range(100, 107))))[0] == 0
    assert manager.lookup(FakeRequest("c", list(range(9)))).tokens == 0
    assert len(manager.inspect().cached_hashes) == 1


@both_rules
def test_k9_blocks_just_hit_are_not_evicted_for_the_same_requests_new_blocks(
    rule: Callable[[int], EvictionRule],
) -> None:
    manager = PagedKVCacheManager(num_blocks=2, block_size=4, make_eviction=rule)
    first = FakeRequest("a", list(range(4)))
    start(manager, first)
    manager.free(first)
    second = FakeRequest("b", [9])
    start(manager, second)
    manager.free(second)  # both are free now, and block 1 has been so for longer
    assert start(manager, FakeRequest("c", [*range(4), 7])) == (4, [1, 2])


@both_rules
def test_k9_a_hit_on_free_blocks_leaves_fewer_for_new_ones(rule: Callable[[int], EvictionRule]) -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4, make_eviction=rule)
    seed, other = FakeRequest("seed", list(range(8))), FakeRequest("other", [9])
    start(manager, seed)
    start(manager, other)
    manager.free(seed)
    request = FakeRequest("b", list(range(9)))
    hit = manager.lookup(request)
    assert (hit.tokens, manager.usage.num_free_blocks) == (8, 2)
    assert manager.allocate(request, 9, hit) is None
    manager.check_invariants()
    manager.free(other)
    assert start(manager, request) == (8, [1, 2, 3])


def test_k16_a_content_stays_cached_while_one_of_its_blocks_lives() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    first = FakeRequest("a", list(range(4)))
    start(manager, first)
    start(manager, FakeRequest("b", list(range(4)), skip_prefix_cache=True))
    manager.free(first)
    start(manager, FakeRequest("c", list(range(100, 108))))
    assert manager.lookup(FakeRequest("d", list(range(5)))).tokens == 4


# What separates requests


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "y"},
        {"cache_salt": ""},
        {"lora_name": "x"},
        {"cache_salt": "x", "lora_name": ""},
        {"cache_salt": "x", "extra_keys": [ExtraKey("image", 0, 1)]},
    ],
)
def test_g2_k24_salt_adapter_and_extra_keys_separate_the_cache(other: dict[str, object]) -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=4)
    tokens = list(range(9))
    start(manager, FakeRequest("a", tokens, cache_salt="x"))
    assert manager.lookup(FakeRequest("b", tokens)).tokens == 0
    assert manager.lookup(FakeRequest("c", tokens, **other)).tokens == 0  # type: ignore[arg-type]
    assert manager.lookup(FakeRequest("d", tokens, cache_salt="x")).tokens == 8


def test_k24_an_extra_key_separates_from_the_block_it_starts_in_and_is_shared_by_its_equals() -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=4)
    tokens = list(range(17))
    start(manager, FakeRequest("a", tokens, extra_keys=[ExtraKey("cat", 6, 10)]))
    hits = [
        manager.lookup(FakeRequest("b", tokens, extra_keys=keys)).tokens
        for keys in ([], [ExtraKey("dog", 6, 10)], [ExtraKey("cat", 7, 11)], [ExtraKey("cat", 6, 10)])
    ]
    assert hits == [4, 4, 4, 16]


# Reports


def test_new_block_ids_are_int32_and_nobody_can_change_the_table_through_them() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(9)))
    first = manager.allocate(request, 9)
    second = manager.allocate(request, 13)
    assert first is not None
    assert second is not None
    assert [(array.dtype.name, array.tolist()) for array in (*first[0], *second[0])] == [
        ("int32", [1, 2, 3]),
        ("int32", [4]),
    ]
    manager.block_ids(request)[0][:] = 9
    assert table(manager, request) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        second[0][0][0] = 9


def test_inspection_names_every_usable_block_and_the_keys_that_can_be_found() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    start(manager, FakeRequest("a", list(range(5))))
    inspection = manager.inspect()
    assert inspection.ref_counts == {1: 1, 2: 1, 3: 0}
    assert inspection.cached_hashes == {manager.pool.block_hash(1)}


def test_the_invariant_check_notices_a_leaked_reference_and_a_table_that_lies() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    request = FakeRequest("a", list(range(5)))
    start(manager, request)
    manager.pool.pop(1)
    with pytest.raises(RuntimeError, match="block 3: reference count 1, in 0 table entries"):
        manager.check_invariants()
    manager._held["a"].tables[0][1] = 1
    with pytest.raises(RuntimeError, match=r"request a: blocks \[1\] are in its tables more than once"):
        manager.check_invariants()
    manager._held["a"].tables[0][1] = 0
    with pytest.raises(RuntimeError, match="have left the window"):
        manager.check_invariants()
