"""Several KV groups over one pool, and groups with a sliding window."""

from __future__ import annotations

import pytest
from kv_requests import FakeRequest, decode, start, table
from tokenyard.interfaces import Hit
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.kv_cache.groups import KVGroup, longest_hit, split_key


def windowed(
    *windows: int | None, num_blocks: int = 24, block_size: int = 4, caching: bool = True
) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        num_blocks=num_blocks, block_size=block_size, group_windows=windows, enable_prefix_caching=caching
    )


def evict(manager: PagedKVCacheManager, *blocks: int) -> None:
    """Hand out every free block and give back those that were not named, without their content."""
    free = manager.usage.num_free_blocks
    found = manager.pool.pop(free)
    assert set(blocks) <= set(found)
    manager.pool.release(found)


def test_every_group_has_a_table_of_its_own_from_one_pool() -> None:
    manager = windowed(None, None, num_blocks=8)
    request = FakeRequest("a", list(range(9)))
    allocation = manager.allocate(request, 9, Hit(0))
    assert allocation is not None
    assert [new.tolist() for new in allocation.new_block_ids] == [[1, 2, 3], [4, 5, 6]]
    assert allocation.valid_until_tokens == 12
    assert manager.usage == (2, 8)
    assert manager.allocate(request, 17) is None
    grown = manager.allocate(request, 13)
    assert grown is not None
    assert [new.tolist() for new in grown.new_block_ids] == [[7], [8]]
    manager.check_invariants()
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == (8, 8)


def test_a_block_of_one_group_never_serves_another() -> None:
    manager = windowed(None, None)
    first = FakeRequest("a", list(range(9)))
    start(manager, first)
    assert len(manager.inspect().cached_hashes) == 4
    second = FakeRequest("b", list(range(9)))
    assert start(manager, second)[0] == 8
    for group in (0, 1):
        assert table(manager, second, group)[:2] == table(manager, first, group)[:2]
    assert not set(table(manager, second, 0)) & set(table(manager, second, 1))


def test_a_hit_needs_every_full_group() -> None:
    manager = windowed(None, None, num_blocks=6)
    request = FakeRequest("a", list(range(9)))
    start(manager, request)
    manager.free(request)
    start(manager, FakeRequest("b", [99]))  # takes the last block of each group, without content
    start(manager, FakeRequest("c", [98]))  # and the second
    assert manager.lookup(FakeRequest("d", list(range(9)))).tokens == 4


@pytest.mark.parametrize(("num_groups", "tokens"), [(1, 40), (2, 20), (3, 12)])
def test_capacity_is_what_one_request_can_hold_in_all_groups(num_groups: int, tokens: int) -> None:
    manager = windowed(*[None, 4, 4][:num_groups], num_blocks=10)
    assert manager.capacity_tokens() == tokens
    assert manager.allocate(FakeRequest("b", list(range(tokens + 1))), tokens + 1) is None
    assert manager.allocate(FakeRequest("a", list(range(tokens))), tokens) is not None


# Sliding windows


@pytest.mark.parametrize("caching", [True, False])
def test_k20_what_left_the_window_is_freed_once_and_its_entry_is_null(caching: bool) -> None:
    manager = windowed(6, num_blocks=5, caching=caching)
    request = FakeRequest("a", list(range(16)))
    start(manager, request)
    # The query at 16 reads 11 .. 16: block 2 holds 8 .. 11
    assert table(manager, request) == [0, 0, 3, 4]
    assert manager.usage == (3, 5)
    decode(manager, request, 50)
    assert table(manager, request)[:4] == [0, 0, 0, 4]
    for token in range(51, 80):  # for ever, in five blocks
        decode(manager, request, token)
        assert manager.usage.num_free_blocks >= 2
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == (5, 5)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_k20_exactly_what_no_later_query_reads_is_freed(window: int, block_size: int) -> None:
    manager = windowed(window, block_size=block_size, num_blocks=40)
    request = FakeRequest("a", list(range(30)))
    assert manager.allocate(request, 30) is not None
    for num_computed in range(31):
        manager.commit(request, num_computed)
        manager.check_invariants()
        first_read = max(0, num_computed - window + 1)
        assert table(manager, request).count(0) == first_read // block_size


def test_k20_the_longest_prefix_whose_window_is_cached_is_a_hit() -> None:
    manager = windowed(8)  # ceil(7 / 4) = 2 blocks
    request = FakeRequest("a", list(range(20)))
    start(manager, request)
    assert table(manager, request) == [0, 0, 0, 4, 5]
    hit, entries = start(manager, FakeRequest("b", [*range(20), 1]))
    assert (hit, entries) == (20, [0, 0, 0, 4, 5, 6])
    assert start(manager, FakeRequest("c", list(range(20))))[0] == 16


def test_k20_a_gap_outside_the_window_does_not_matter_and_one_inside_does() -> None:
    group = KVGroup(0, 8, 4)
    keys = [bytes([number]) * 32 for number in range(6)]

    def longest(*cached: int) -> int:
        found = {keys[number]: number + 1 for number in cached}
        return longest_hit([group], keys, found.get)

    assert longest() == 0
    assert longest(0, 1, 2, 3, 4, 5) == 6
    assert longest(4, 5) == 6
    assert longest(0, 1, 3, 5) == 2
    assert longest(2, 3, 5) == 4
    assert longest(0, 2, 4) == 1
    assert longest(3) == 0
    assert longest(5) == 0


def test_k20_a_hit_suits_every_group() -> None:
    keys = [bytes([number]) * 32 for number in range(8)]
    groups = [KVGroup(0, None, 4), KVGroup(1, 8, 4), KVGroup(2, 5, 4)]

    def longest(*cached: str) -> int:
        found = {
            groups[group].keys([keys[int(number)]])[0]: 1 for group, numbers in enumerate(cached) for number in numbers
        }
        return longest_hit(groups, keys, found.get)

    assert longest("01234567", "67", "7") == 8
    assert longest("0123456", "45", "5") == 6
    assert longest("01234567", "23", "37") == 4
    assert longest("01234567", "4567", "3") == 0
    assert longest("01234567", "01", "0") == 1
    assert longest("", "01234567", "01234567") == 0


def test_k20_a_window_of_one_token_still_rests_on_something_cached() -> None:
    manager = windowed(1)
    assert manager.lookup(FakeRequest("a", list(range(9)))).tokens == 0
    first, second = FakeRequest("b", list(range(9))), FakeRequest("c", list(range(9)))
    start(manager, first)
    hit = manager.lookup(second)
    allocation = manager.allocate(second, 9, hit)
    assert allocation is not None
    assert (hit.tokens, allocation.new_block_ids[0].tolist()[:2]) == (8, [0, 2])
    manager.check_invariants()


def test_a_request_whose_blocks_have_all_left_the_window_does_not_hinder_a_reset() -> None:
    manager = windowed(1, num_blocks=3)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    assert (table(manager, request), manager.usage) == ([0, 0], (3, 3))
    assert manager.reset() is True
    decode(manager, request, 8, 9, 10, 11)
    assert len(manager.inspect().cached_hashes) == 1


def test_k20_a_window_group_hits_as_far_as_the_full_group_allows() -> None:
    manager = windowed(None, 4)
    first = FakeRequest("a", list(range(21)))
    start(manager, first)
    assert table(manager, first, 0)[:5] == [1, 2, 3, 4, 5]
    assert table(manager, first, 1)[:4] == [0, 0, 0, 0]
    second = FakeRequest("b", list(range(21)))
    assert start(manager, second)[0] == 20
    assert table(manager, second, 0)[:5] == [1, 2, 3, 4, 5]
    assert table(manager, second, 1)[:5] == [0, 0, 0, 0, table(manager, first, 1)[4]]
    assert start(manager, FakeRequest("c", [*range(12), *range(90, 99)]))[0] == 12


def test_what_left_the_window_stays_cached_until_it_is_evicted() -> None:
    manager = windowed(4, num_blocks=8)
    start(manager, FakeRequest("a", list(range(16))))
    shorter = FakeRequest("b", list(range(9)))
    assert start(manager, shorter)[0] == 8
    assert table(manager, shorter)[:2] == [0, 2]
    evict(manager, 3)
    assert manager.lookup(FakeRequest("c", list(range(13)))).tokens == 8


def test_a_block_that_left_one_requests_window_stays_with_the_other() -> None:
    manager = windowed(4, num_blocks=12)
    first, second = FakeRequest("a", list(range(8))), FakeRequest("b", list(range(9)))
    start(manager, first)
    start(manager, second)
    assert table(manager, first) == [0, 2]
    assert table(manager, second)[:2] == [0, 2]
    decode(manager, first, 50, 51, 52, 53)
    assert (table(manager, first)[:2], manager.pool.ref_count(2)) == ([0, 0], 1)
    assert table(manager, second)[:2] == [0, 2]
    manager.free(second)
    assert manager.pool.ref_count(2) == 0
    manager.check_invariants()


def test_steps_in_flight_keep_what_their_queries_read() -> None:
    manager = windowed(4, num_blocks=8)
    request = FakeRequest("a", list(range(16)))
    assert manager.allocate(request, 16) is not None
    manager.commit(request, 8)  # tokens 8 .. 15 are being computed: the first of them reads 5 .. 8
    assert table(manager, request) == [0, 2, 3, 4]
    manager.commit(request, 16)
    assert table(manager, request) == [0, 0, 0, 4]


def test_the_end_of_a_prefix_goes_first_in_all_groups_alike() -> None:
    manager = windowed(None, None, num_blocks=6)
    request = FakeRequest("a", list(range(12)))
    start(manager, request)
    manager.free(request)
    assert manager.pool.pop(6) == [3, 6, 2, 5, 1, 4]


def test_of_what_left_a_window_the_end_goes_first() -> None:
    manager = windowed(1, num_blocks=3)
    start(manager, FakeRequest("a", list(range(12))))
    assert manager.pool.pop(3) == [3, 2, 1]


def test_a_key_can_be_split_into_digest_and_group() -> None:
    digest = bytes(range(32))
    for index in (0, 1, 300):
        assert split_key(KVGroup(index, None, 4).keys([digest])[0]) == (digest, index)
