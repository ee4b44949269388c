"""PagedKVCacheManager and its block pool: tables, hits, eviction, invariants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tokenyard.interfaces import Hit
from tokenyard.kv_cache import BlockPool, PagedKVCacheManager
from tokenyard.kv_cache.hashing import block_hash, root_hash

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray


@dataclass
class FakeRequest:
    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    lora_name: str | None = None
    skip_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> IntArray:
        return np.array(self.tokens, dtype=np.int32)


def start(manager: PagedKVCacheManager, request: FakeRequest) -> tuple[int, list[int]]:
    """Admit a request and compute its prompt: (hit tokens, its block table)."""
    hit = manager.lookup(request)
    allocation = manager.allocate(request, request.num_tokens, hit)
    assert allocation is not None
    manager.commit(request, request.num_tokens)
    manager.check_invariants()
    return hit.tokens, manager.block_ids(request)[0].tolist()


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


def test_k7_the_end_of_a_freed_request_is_evicted_before_its_start() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=16)
    first, second = FakeRequest("a", list(range(90))), FakeRequest("b", list(range(1000, 1048)))
    start(manager, first)
    start(manager, second)
    manager.free(first)
    manager.free(second)
    assert start(manager, FakeRequest("c", [*range(32), *range(500, 510)])) == (32, [1, 2, 10])


def test_k7_of_one_request_the_last_block_is_reused_first() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    request = FakeRequest("a", list(range(12)))
    start(manager, request)
    manager.free(request)
    assert start(manager, FakeRequest("b", [900, 901]))[1] == [3]
    assert manager.lookup(FakeRequest("c", list(range(12)))).tokens == 8


def test_kv_02_recomputing_the_last_block_keeps_the_chain() -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=16)
    hits = []
    for length in (48, 48, 48, 64):
        request = FakeRequest(f"r{len(hits)}", list(range(length)))
        hits.append(start(manager, request)[0])
        manager.free(request)
    assert hits == [0, 32, 32, 48]


def test_u6_lookahead_takes_blocks_for_tokens_that_may_come() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(3)))
    allocation = manager.allocate(request, 3, Hit(0), num_lookahead=2)
    assert allocation is not None
    assert (allocation.new_block_ids[0].tolist(), allocation.valid_until_tokens) == ([1, 2], 8)
    assert manager.allocate(request, 15, num_lookahead=2) is None


def test_what_was_remembered_of_a_waiting_request_goes_with_it() -> None:
    manager = PagedKVCacheManager(num_blocks=8, block_size=4)
    start(manager, FakeRequest("seed", list(range(9))))
    waiting = FakeRequest("a", list(range(9)))
    assert manager.lookup(waiting).tokens == 8
    manager.free(waiting)
    assert manager.lookup(FakeRequest("a", list(range(100, 109)))).tokens == 0


def test_k8_a_reused_block_has_lost_its_hash() -> None:
    manager = PagedKVCacheManager(num_blocks=2, block_size=4)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    manager.free(request)
    assert start(manager, FakeRequest("b", list(range(100, 107))))[0] == 0
    assert manager.lookup(FakeRequest("c", list(range(9)))).tokens == 0


def test_k10_without_caching_nothing_hits_and_too_few_blocks_change_nothing() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4, enable_prefix_caching=False)
    start(manager, FakeRequest("a", list(range(12))))
    assert manager.lookup(FakeRequest("b", list(range(12)))).tokens == 0
    assert manager.allocate(FakeRequest("b", list(range(12))), 12, Hit(0)) is None
    manager.check_invariants()
    assert manager.usage == (1, 4)


def test_k14_something_is_always_left_to_compute() -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=16)
    start(manager, FakeRequest("a", list(range(48))))
    hits = [manager.lookup(FakeRequest("b", list(range(length)))).tokens for length in (16, 17, 32, 48, 49)]
    assert hits == [0, 16, 16, 32, 48]


def test_k15_reset_waits_until_nothing_is_held() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request = FakeRequest("a", list(range(9)))
    start(manager, request)
    assert manager.reset() is False
    manager.free(request)
    assert manager.reset() is True
    assert manager.pool.cached_hashes() == frozenset()
    assert manager.lookup(FakeRequest("b", list(range(9)))).tokens == 0


def test_k16_a_content_stays_cached_while_one_of_its_blocks_lives() -> None:
    manager = PagedKVCacheManager(num_blocks=3, block_size=4)
    first = FakeRequest("a", list(range(4)))
    start(manager, first)
    start(manager, FakeRequest("b", list(range(4)), skip_prefix_cache=True))
    manager.free(first)
    start(manager, FakeRequest("c", list(range(100, 108))))
    assert manager.lookup(FakeRequest("d", list(range(5)))).tokens == 4


def test_k22_a_follow_up_hits_prompt_and_generated_tokens() -> None:
    manager = PagedKVCacheManager(num_blocks=10, block_size=4)
    request = FakeRequest("a", list(range(6)))
    start(manager, request)
    for token in range(50, 56):
        request.tokens.append(token)
        assert manager.allocate(request, request.num_tokens) is not None
        manager.commit(request, request.num_tokens)
    manager.free(request)
    assert manager.lookup(FakeRequest("b", [*request.tokens, 99])).tokens == 12


def test_g2_tenants_and_adapters_never_share_blocks() -> None:
    manager = PagedKVCacheManager(num_blocks=20, block_size=4)
    tokens = list(range(9))
    start(manager, FakeRequest("a", tokens, cache_salt="x"))
    others = [(None, None), ("y", None), ("", None), (None, "x"), ("x", "")]
    for number, (salt, lora) in enumerate(others):
        request = FakeRequest(f"b{number}", tokens, cache_salt=salt, lora_name=lora)
        assert manager.lookup(request).tokens == 0
    assert manager.lookup(FakeRequest("c", tokens, cache_salt="x")).tokens == 8
    assert len({root_hash(*pair) for pair in [*others, ("x", None)]}) == 6


def test_a_block_hash_depends_on_everything_before_the_block() -> None:
    tokens = np.arange(4, dtype=np.int32)
    first = block_hash(root_hash(None, None), tokens)
    assert block_hash(first, tokens) != first
    assert block_hash(root_hash("x", None), tokens) != first


def test_a_hit_taken_late_is_a_bug_that_is_noticed() -> None:
    manager = PagedKVCacheManager(num_blocks=4, block_size=4)
    request, late = FakeRequest("a", list(range(8))), FakeRequest("b", list(range(9)))
    start(manager, request)
    hit = manager.lookup(late)
    manager.free(request)
    start(manager, FakeRequest("c", list(range(100, 116))))
    with pytest.raises(RuntimeError, match="after its blocks changed"):
        manager.allocate(late, 9, hit)


def test_the_pool_notices_a_block_that_is_released_twice_or_handed_out_twice() -> None:
    pool = BlockPool(2)
    blocks = pool.pop(2)
    with pytest.raises(RuntimeError, match="no free blocks"):
        pool.pop(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="more often"):
        pool.release(blocks[:1])


@dataclass
class _Model:
    """What each request should hold."""

    request: FakeRequest
    num_computed: int = 0
    tables: list[Sequence[int]] = field(default_factory=list)


class ManagerMachine(RuleBasedStateMachine):
    """Requests come, grow, share prefixes and go, in any order, in a pool that is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = PagedKVCacheManager(num_blocks=9, block_size=2)
        self.live: dict[str, _Model] = {}
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> the tokens up to its end, as written
        self.count = 0

    @rule(family=st.integers(0, 1), length=st.integers(1, 9))
    def admit(self, family: int, length: int) -> None:
        self.count += 1
        request = FakeRequest(f"r{self.count}", [family * 100 + i for i in range(length)])
        hit = self.manager.lookup(request)
        assert hit.tokens < length
        assert hit.tokens % 2 == 0
        before = self.manager.usage
        if self.manager.allocate(request, length, hit) is None:
            assert self.manager.usage == before
            self.manager.free(request)
            return
        blocks = self.manager.block_ids(request)[0].tolist()
        for index in range(hit.tokens // 2):
            assert self.contents[blocks[index]] == tuple(request.tokens[: 2 * index + 2]), "a hit on foreign content"
        self.live[request.request_id] = _Model(request)
        self._write(request, length)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 3))
    def grow(self, data: st.DataObject, token: int) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))].request
        if self.manager.allocate(request, request.num_tokens + 1) is None:
            assert self.manager.usage.num_free_blocks == 0
            return
        request.tokens.append(token)
        self._write(request, request.num_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.manager.free(self.live.pop(data.draw(st.sampled_from(sorted(self.live)))).request)

    @rule()
    def reset(self) -> None:
        assert self.manager.reset() == (not self.live)

    @invariant()
    def tables_cover_what_is_computed_and_counts_agree(self) -> None:
        self.manager.check_invariants()
        for model in self.live.values():
            blocks = self.manager.block_ids(model.request)[0]
            assert len(blocks) == -(-model.request.num_tokens // 2)
            for index, block in enumerate(blocks.tolist()):
                expected = tuple(model.request.tokens[: 2 * index + 2])
                assert self.contents[block][: len(expected)] == expected, "a block was overwritten while it was held"

    def _write(self, request: FakeRequest, length: int) -> None:
        for index, block in enumerate(self.manager.block_ids(request)[0].tolist()):
            self.contents[block] = tuple(request.tokens[: min(length, 2 * index + 2)])
        self.manager.commit(request, length)


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
