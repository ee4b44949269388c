"""What does not fit, what is stale, and what is freed: failed attempts leave nothing behind."""

from __future__ import annotations

import pytest
from kv_requests import FakeRequest, decode, ids, start, table
from tokenyard.interfaces import Hit
from tokenyard.kv_cache import PagedKVCacheManager


@pytest.mark.parametrize("caching", [False, True])
def test_k10_too_few_blocks_change_nothing(caching: bool) -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=caching)
    start(manager, FakeRequest("a", list(range(12))))
    other = FakeRequest("b", list(range(12)))
    hit, before = manager.lookup(other), manager.inspect()
    assert hit.tokens == (8 if caching else 0)
    assert manager.allocate(other, 20, hit) is None
    assert (manager.usage, manager.inspect(), table(manager, other)) == ((1, 4), before, [])
    manager.check_invariants()


def test_k10_a_running_request_that_cannot_grow_keeps_what_it_has() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    assert manager.allocate(request, 17) is None
    assert (table(manager, request), manager.usage) == ([1, 2], (1, 3))
    assert ids(manager.allocate(request, 12)) == [3]
    manager.check_invariants()


def test_sch_09_nothing_of_a_failed_attempt_survives() -> None:
    manager = PagedKVCacheManager(num_blocks=6, block_size=4)
    prompt = list(range(16))
    seed = FakeRequest("seed", prompt)
    start(manager, seed)
    manager.free(seed)
    blocker = FakeRequest("blocker", list(range(50, 57)))
    start(manager, blocker)
    query = FakeRequest("q", [*prompt, *range(70, 78)])
    hit, before = manager.lookup(query), manager.inspect()
    assert hit.tokens == 16
    assert manager.allocate(query, query.num_tokens, hit) is None
    assert manager.inspect() == before
    manager.free(blocker)
    thief = FakeRequest("thief", list(range(80, 104)))  # takes every block, so P's are evicted
    start(manager, thief)
    assert manager.lookup(query).tokens == 0
    manager.free(thief)
    with pytest.raises(RuntimeError, match=r"request q: Hit\(tokens=16.*look the request up again"):
        manager.allocate(query, query.num_tokens, hit)
    assert start(manager, query)[0] == 0
    assert sorted(table(manager, query)) == [1, 2, 3, 4, 5, 6]


def test_sch_09_a_request_looked_up_again_with_more_tokens_is_hashed_by_all_of_them() -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    start(manager, FakeRequest("seed", [*range(8), 5, 5, 5, 5]))
    request = FakeRequest("a", list(range(8)))
    assert manager.lookup(request).tokens == 4
    request.tokens += [6, 6, 6, 6, 1]
    assert manager.lookup(request).tokens == 8
    assert manager.lookup(FakeRequest("b", [*range(8), 5, 5, 5, 5, 1])).tokens == 12


def test_what_was_remembered_of_a_waiting_request_goes_with_it() -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    start(manager, FakeRequest("seed", list(range(9))))
    waiting = FakeRequest("a", list(range(9)))
    assert manager.lookup(waiting).tokens == 8
    manager.free(waiting)
    assert len(manager._chains) == 0
    assert manager.lookup(FakeRequest("a", list(range(100, 109)))).tokens == 0


def test_a_look_up_after_the_end_does_not_reach_the_next_request_of_that_id() -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    ended = FakeRequest("a", list(range(9)))
    start(manager, ended)
    manager.free(ended)
    assert manager.lookup(ended).tokens == 8
    following = FakeRequest("a", list(range(100, 105)))
    assert start(manager, following)[0] == 0
    assert manager.lookup(ended).tokens == 8
    decode(manager, following, 105, 106, 107)
    assert manager.lookup(FakeRequest("b", list(range(100, 109)))).tokens == 8


def test_a_hit_belongs_to_the_first_call() -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    request = FakeRequest("a", list(range(9)))
    start(manager, request)
    assert manager.allocate(request, 9, Hit(0)) is not None
    with pytest.raises(RuntimeError, match="request a holds blocks already"):
        manager.allocate(request, 9, Hit(4))
    manager.check_invariants()


@pytest.mark.parametrize("tokens", [-4, 3, 12])
def test_a_hit_that_no_look_up_can_have_returned_is_refused(tokens: int) -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    start(manager, FakeRequest("seed", list(range(16))))
    before = manager.inspect()
    with pytest.raises(RuntimeError, match="look the request up again"):
        manager.allocate(FakeRequest("a", list(range(10))), 10, Hit(tokens))
    assert manager.inspect() == before


def test_committing_what_is_not_held_or_not_known_is_noticed() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(5)))
    with pytest.raises(RuntimeError, match="request a holds no blocks for 4 tokens"):
        manager.commit(request, 4)
    start(manager, request)
    with pytest.raises(RuntimeError, match="holds no blocks for 9 tokens"):
        manager.commit(request, 9)
    with pytest.raises(RuntimeError, match="its tokens 4 to 8"):
        manager.commit(request, 8)
    manager.check_invariants()
    assert len(manager.inspect().cached_hashes) == 1


def test_freeing_twice_or_what_holds_nothing_is_no_error() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(9)))
    manager.free(request)
    start(manager, request)
    manager.free(request)
    manager.free(request)
    manager.check_invariants()
    assert manager.usage == (4, 4)


def test_k15_reset_waits_until_nothing_is_held() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(9)))
    start(manager, request)
    assert manager.reset() is False
    assert len(manager.inspect().cached_hashes) == 2
    manager.free(request)
    assert manager.reset() is True
    assert manager.inspect().cached_hashes == frozenset()
    assert [manager.pool.block_hash(block) for block in range(1, 5)] == [None] * 4
    assert manager.lookup(FakeRequest("b", list(range(9)))).tokens == 0
    manager.check_invariants()
