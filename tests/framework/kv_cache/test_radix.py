"""RadixKVCacheManager: the tree, what is evicted from it, and the same hits as block hashes give."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_requests import FakeRequest, decode, start, table
from tokenyard.config import NO_OPTIONS, KVCacheConfig
from tokenyard.errors import ConfigError
from tokenyard.interfaces import Hit
from tokenyard.interfaces.kv_cache import ExtraKey, KVCacheManagerContext
from tokenyard.kv_cache import PagedKVCacheManager, RadixKVCacheManager
from tokenyard.kv_cache.radix_tree import Node
from tokenyard.kv_events import BlockRemoved, BlockStored
from tokenyard.testing import EngineHarness
from tokenyard_plugins.radix import tokenyard_kv_cache_managers

ABC = list(range(12))


def radix(num_blocks: int = 20, block_size: int = 4, **more: float) -> RadixKVCacheManager:
    return RadixKVCacheManager(num_blocks=num_blocks, block_size=block_size, **more)  # type: ignore[arg-type]


def ended(manager: RadixKVCacheManager, *requests: FakeRequest) -> None:
    """They are computed and gone, one after the other."""
    for request in requests:
        start(manager, request)
        manager.free(request)
    manager.check_invariants()


def nodes(manager: RadixKVCacheManager) -> list[Node]:
    return sorted(manager.blocks.tree.nodes(), key=lambda node: (node.start, node.tokens))


def hit(manager: RadixKVCacheManager, tokens: Sequence[int]) -> int:
    """Tokens of a hit for these and one more."""
    return manager.lookup(FakeRequest("?", [*tokens, 77])).tokens


# The tree


def test_a_request_is_one_node_and_grows_while_nobody_else_uses_its_end() -> None:
    manager = radix()
    request = FakeRequest("a", ABC[:6])
    start(manager, request)
    decode(manager, request, *range(6, 17))
    assert [node.blocks for node in nodes(manager)] == [[1, 2, 3, 4]]
    assert hit(manager, request.tokens) == 16


def test_nodes_are_split_where_requests_part_at_the_edge_of_a_block() -> None:
    manager = radix()
    start(manager, FakeRequest("a", ABC))
    start(manager, FakeRequest("b", [*ABC[:6], 90, 91, 92, 93, 94, 95]))
    assert [(node.start, node.blocks) for node in nodes(manager)] == [(0, [1]), (1, [2, 3]), (1, [4, 5])]
    assert [hit(manager, tokens) for tokens in (ABC, [*ABC[:6], 90, 91, 92, 93], ABC[:7], [9])] == [12, 8, 4, 0]


def test_requests_share_to_the_token_where_a_block_is_one() -> None:
    manager = radix(block_size=1)
    start(manager, FakeRequest("a", ABC))
    assert start(manager, FakeRequest("b", [*ABC[:7], 50, 51])) == (7, [1, 2, 3, 4, 5, 6, 7, 13, 14])
    assert [node.start for node in nodes(manager)] == [0, 7, 7]


def test_a_second_request_below_a_shared_end_gets_a_node_of_its_own() -> None:
    manager = radix()
    first, second = FakeRequest("a", [*ABC[:8], 1]), FakeRequest("b", [*ABC[:8], 2])
    start(manager, first)
    start(manager, second)
    decode(manager, first, 1, 1, 1)
    assert [(node.start, node.blocks) for node in nodes(manager)] == [(0, [1, 2]), (2, [3])]
    decode(manager, second, 2, 2, 2)
    assert [(node.start, node.blocks) for node in nodes(manager)] == [(0, [1, 2]), (2, [3]), (2, [4])]


def test_a_block_with_extra_keys_is_found_by_its_equals_alone() -> None:
    manager = radix()
    cat, dog = [ExtraKey("cat", 5, 7)], [ExtraKey("dog", 5, 7)]
    for number, keys in enumerate(([], cat, dog)):
        assert start(manager, FakeRequest(str(number), ABC, extra_keys=keys))[0] == (4 if number else 0)
    again = [manager.lookup(FakeRequest("?", [*ABC, 1], extra_keys=keys)).tokens for keys in ([], cat, dog)]
    assert again == [12, 12, 12]
    manager.check_invariants()


def test_trees_of_tenants_that_are_gone_leave_nothing_behind() -> None:
    manager = radix(num_blocks=4)
    for number in range(30):
        ended(manager, FakeRequest("a", ABC, cache_salt=f"tenant {number}"))
    assert len(manager.blocks.tree._roots) <= 2


def test_tokens_that_are_not_int32_are_refused() -> None:
    class Wide(FakeRequest):
        token_ids = property(lambda self: FakeRequest.token_ids.__get__(self).astype("int64"))  # type: ignore[assignment]

    with pytest.raises(RuntimeError, match="request a: its tokens 0 to 8 are to be compared as int32"):
        radix().lookup(Wide("a", ABC[:9]))


# Blocks of equal content


def test_of_two_that_computed_the_same_one_is_found_and_the_other_takes_its_place() -> None:
    manager = radix(num_blocks=6)
    first, second = FakeRequest("a", ABC[:8]), FakeRequest("b", [*ABC[:8], 3], skip_prefix_cache=True)
    start(manager, first)
    assert start(manager, second) == (0, [3, 4, 5])
    assert [node.blocks for node in nodes(manager)] == [[1, 2]]
    manager.free(first)
    assert [node.blocks for node in nodes(manager)] == [[3, 4]]
    assert manager.usage.num_free_blocks == 3
    assert start(manager, FakeRequest("c", [*ABC[:8], 4]))[1][:2] == [3, 4]
    manager.free(second)
    manager.check_invariants()


def test_what_follows_a_block_that_another_computed_too_outlives_that_one() -> None:
    """Who holds what comes after holds what is before: no content without a reference is above one with some."""
    manager = radix(num_blocks=6)
    first, second = FakeRequest("a", ABC[:4]), FakeRequest("b", [*ABC[:8], 3], skip_prefix_cache=True)
    start(manager, first)
    start(manager, second)
    manager.free(first)
    start(manager, FakeRequest("c", [50] * 12))  # takes every other block
    assert manager.usage.num_free_blocks == 0
    assert hit(manager, ABC[:8]) == 8


def test_computing_again_what_is_cached_and_unused_gives_the_old_block_back() -> None:
    manager = radix(num_blocks=6)
    ended(manager, FakeRequest("a", ABC[:8]))
    start(manager, FakeRequest("b", ABC[:8], skip_prefix_cache=True))
    assert manager.usage.num_free_blocks == 4
    assert hit(manager, ABC[:8]) == 8


# Eviction


def test_k7_the_end_of_the_leaf_that_was_used_longest_ago_goes_first() -> None:
    manager = radix(num_blocks=6)
    ended(manager, FakeRequest("a", [*ABC[:4], *[1] * 4]), FakeRequest("b", [*ABC[:4], *[2] * 4]))
    ended(manager, FakeRequest("c", [*ABC[:4], *[1] * 4, 9]))  # the leaf of 1 is the newer one now
    start(manager, FakeRequest("d", [50] * 16))
    assert [hit(manager, [*ABC[:4], *[token] * 4]) for token in (1, 2)] == [8, 4]


def test_a_beginning_goes_after_all_that_follows_it_however_long_ago_it_was_used_alone() -> None:
    manager = radix(num_blocks=4)
    ended(manager, FakeRequest("a", ABC[:8]), FakeRequest("b", [5] * 4))
    for num_free_after, expected in ((3, (8, 4)), (2, (4, 4)), (1, (0, 4)), (0, (0, 0))):
        start(manager, FakeRequest(f"other {num_free_after}", [60 + num_free_after]))
        assert (hit(manager, ABC[:8]), hit(manager, [5] * 4)) == expected


def test_of_a_leaf_whose_beginning_is_in_use_the_rest_is_evicted() -> None:
    manager = radix(num_blocks=6)
    ended(manager, FakeRequest("a", ABC), FakeRequest("b", [5] * 8))
    assert start(manager, FakeRequest("c", [*ABC[:4], 50])) == (4, [1, 6])
    assert start(manager, FakeRequest("d", [60] * 12)) == (0, [3, 2, 5])
    assert (hit(manager, ABC), hit(manager, [5] * 8)) == (4, 4)


def test_k9_a_hit_is_not_evicted_for_its_own_new_blocks_and_a_stale_one_is_refused() -> None:
    manager = radix(num_blocks=3)
    ended(manager, FakeRequest("a", ABC[:8]))
    request = FakeRequest("b", [*ABC[:8], 1])
    stale = manager.lookup(request)
    assert start(manager, request) == (8, [1, 2, 3])
    manager.free(request)
    start(manager, FakeRequest("c", [50] * 9))
    with pytest.raises(RuntimeError, match="look the request up again"):
        manager.allocate(request, 9, stale)
    with pytest.raises(RuntimeError, match="look the request up again"):
        manager.allocate(request, 9, Hit(3))


def test_the_queue_of_leaves_does_not_grow_with_requests() -> None:
    manager = radix(num_blocks=20)
    for number in range(500):
        ended(manager, FakeRequest("a", [number % 2] * 9))
    queued = sum(map(len, manager.blocks._leaves._heaps.values()))
    assert queued <= len(nodes(manager)) == 2


# Retention


def test_low_leaves_go_first_and_high_ones_last() -> None:
    manager = radix(num_blocks=4, retention_share=0.5)
    for level, token in (("high", 1), ("normal", 2), ("low", 3)):
        ended(manager, FakeRequest("a", [token] * 4, retention=level))  # type: ignore[arg-type]
    kept = []
    for number in range(4):
        start(manager, FakeRequest(f"x{number}", [60 + number]))
        kept.append([token for token in (1, 2, 3) if hit(manager, [token] * 4)])
    assert kept == [[1, 2, 3], [1, 2], [1], []]


def test_more_than_the_share_of_high_leaves_go_like_normal_ones() -> None:
    manager = radix(num_blocks=4, retention_share=0.25)
    for token, level in ((1, "high"), (2, "normal"), (3, "high"), (4, "normal")):
        ended(manager, FakeRequest("a", [token] * 4, retention=level))  # type: ignore[arg-type]
    gone = []
    for number in range(4):
        start(manager, FakeRequest(f"x{number}", [60 + number]))
        gone += [token for token in (1, 2, 3, 4) if not hit(manager, [token] * 4) and token not in gone]
    assert gone == [1, 2, 4, 3]


def test_a_shared_beginning_has_the_highest_level_of_its_users() -> None:
    manager = radix(num_blocks=6)
    ended(manager, FakeRequest("a", ABC[:8], retention="low"), FakeRequest("b", [*ABC[:4], 3, 3], retention="high"))
    ended(manager, FakeRequest("c", [5] * 12))
    start(manager, FakeRequest("d", [50] * 20))
    assert (hit(manager, ABC[:8]), hit(manager, [5] * 12)) == (4, 0)


def test_both_halves_of_a_leaf_that_is_split_keep_its_level() -> None:
    manager = radix(num_blocks=6)
    ended(manager, FakeRequest("a", ABC[:8], retention="high"), FakeRequest("b", [*ABC[:4], 3, 3, 3, 3]))
    ended(manager, FakeRequest("c", [5] * 12))
    start(manager, FakeRequest("d", [50] * 16))
    assert (hit(manager, ABC[:8]), hit(manager, [5] * 12)) == (8, 0)


def test_k23_what_is_evicted_is_announced_by_its_name_however_often_its_node_was_split() -> None:
    manager = RadixKVCacheManager(num_blocks=6, block_size=4, records_events=True)
    ended(manager, FakeRequest("a", ABC), FakeRequest("b", [*ABC[:4], *[3] * 4]), FakeRequest("c", [*ABC[:8], 3, 3]))
    announced = {event.block_hash for event in manager.take_events() if isinstance(event, BlockStored)}
    assert announced == manager.inspect().cached_hashes
    for number in range(6):
        start(manager, FakeRequest(f"x{number}", [60 + number]))
        for event in manager.take_events():
            assert isinstance(event, BlockRemoved)
            announced.remove(event.block_hash)
        assert announced == manager.inspect().cached_hashes
    assert announced == set()


# As a part


@pytest.mark.parametrize(
    ("config", "windows", "message"),
    [
        (KVCacheConfig(eviction="lfu"), (None,), r"kv_cache\.eviction='lfu' is not for kv_cache=radix"),
        (KVCacheConfig(host_memory="1GiB"), (None,), r"kv_cache\.host_memory=1GiB is not for kv_cache=radix"),
        (KVCacheConfig(), (None, 4096), "this one has K/V groups that attend to all, 4096: set kv_cache=paged"),
        (KVCacheConfig(), (128,), "attend to 128: set kv_cache=paged"),
    ],
)
def test_what_a_tree_cannot_do_is_refused_at_launch(
    config: KVCacheConfig, windows: tuple[int | None, ...], message: str
) -> None:
    (descriptor,) = tokenyard_kv_cache_managers()
    with pytest.raises(ConfigError, match=message):
        descriptor.factory(NO_OPTIONS, KVCacheManagerContext(config=config, num_blocks=4, group_windows=windows))


def test_the_engine_serves_follow_ups_from_the_tree() -> None:
    engine = EngineHarness(["kv_cache=radix", "kv_cache.block_size=1", "kv_cache.num_blocks=64"])
    first = engine.add(list(range(10)), max_tokens=4)
    engine.run()
    answer = engine.requests[first].output_token_ids
    second = engine.add([*range(10), *answer, 5], max_tokens=2)
    engine.run()
    assert engine.requests[second].num_cached == 13  # the K/V of the last token was never computed


def test_exclusive_blocks_are_those_of_nobody_else() -> None:
    for manager in (radix(), PagedKVCacheManager(num_blocks=20, block_size=4)):
        first, second = FakeRequest("a", ABC), FakeRequest("b", [*ABC[:8], 1, 2])
        assert manager.num_exclusive_blocks(first) == 0
        start(manager, first)
        assert manager.num_exclusive_blocks(first) == 3
        start(manager, second)
        assert (manager.num_exclusive_blocks(first), manager.num_exclusive_blocks(second)) == (1, 1)


def test_of_a_hit_the_blocks_that_somebody_holds_are_saved() -> None:
    """Two blocks of a's three are found for c, of which b holds one too."""
    for manager in (radix(), PagedKVCacheManager(num_blocks=20, block_size=4)):
        first, second, new = FakeRequest("a", ABC), FakeRequest("b", [*ABC[:4], 1, 2]), FakeRequest("c", [*ABC[:8], 1])
        start(manager, first)
        start(manager, second)
        found = manager.lookup(new)
        assert found.tokens == 8
        assert manager.num_saved_blocks(new, found) == 2
        assert manager.num_saved_blocks(new, found, [first]) == 1
        assert manager.num_saved_blocks(new, found, [second]) == 2
        assert manager.num_saved_blocks(new, found, [first, second]) == 0
        manager.free(first)
        assert manager.num_saved_blocks(new, manager.lookup(new)) == 1


def test_caching_can_be_off() -> None:
    manager = RadixKVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=False)
    ended(manager, FakeRequest("a", ABC))
    assert (hit(manager, ABC), manager.inspect().cached_hashes) == (0, frozenset())


def test_the_invariant_check_notices_a_leak_and_a_leaf_that_is_not_queued() -> None:
    manager = radix(num_blocks=4)
    ended(manager, FakeRequest("a", ABC[:8]))
    nodes(manager)[0].is_queued = False
    with pytest.raises(RuntimeError, match=r"blocks \[1, 2\] of a leaf would never be evicted"):
        manager.check_invariants()
    nodes(manager)[0].is_queued = True
    manager.blocks.pop(1)
    with pytest.raises(RuntimeError, match="block 3: reference count 1, in 0 table entries"):
        manager.check_invariants()


# Beside block hashes

REQUESTS = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=14),
    st.sampled_from([None, None, None, "tenant"]),
    st.sampled_from([None, None, None, "adapter"]),
    st.sampled_from([(), (), (), (ExtraKey("x", 0, 3),), (ExtraKey("y", 2, 5), ExtraKey("z", 4, 5))]),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(REQUESTS, st.integers(0, 5), st.booleans()), max_size=14))
def test_hits_tables_and_events_are_those_of_block_hashes_where_nothing_is_evicted(
    block_size: int, calls: list[tuple[tuple[list[int], str | None, str | None, tuple[ExtraKey, ...], bool], int, bool]]
) -> None:
    tree = RadixKVCacheManager(num_blocks=280, block_size=block_size, records_events=True)
    hashed = PagedKVCacheManager(num_blocks=280, block_size=block_size, records_events=True)
    managers = (tree, hashed)
    live: list[tuple[FakeRequest, FakeRequest]] = []
    for number, ((tokens, salt, adapter, extras, skips), num_decoded, ends_one) in enumerate(calls):
        pair = tuple(
            FakeRequest(
                str(number),
                list(tokens),
                cache_salt=salt,
                lora_name=adapter,
                extra_keys=extras,
                skip_prefix_cache=skips,
            )
            for _ in managers
        )
        live.append((pair[0], pair[1]))
        hits = [start(manager, request)[0] for manager, request in zip(managers, pair, strict=True)]
        assert hits[0] == hits[1]
        for manager, request in zip(managers, pair, strict=True):
            decode(manager, request, *[number % 2] * num_decoded)
        if ends_one:
            for manager, request in zip(managers, live[number // 2], strict=True):
                manager.free(request)
        assert tree.usage.num_free_blocks >= hashed.usage.num_free_blocks  # of equal blocks it has one to share
        assert tree.inspect().cached_hashes == hashed.inspect().cached_hashes
        assert tree.take_events() == hashed.take_events()
        for one, other in live:
            assert len(table(tree, one)) == len(table(hashed, other))
    assert {tree.lookup(one).tokens - hashed.lookup(other).tokens for one, other in live} <= {0}
