"""The host-memory tier of PagedKVCacheManager: what is swapped out comes back, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_requests import FakeRequest, decode, start, table
from tokenyard.interfaces.kv_cache import Hit, KVCacheManager, KVCacheUsage
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.scheduler_output import HostTransfer
from tokenyard.testing.memory import BlockMemory, TokenChain


def manager_of(num_blocks: int = 8, num_host_blocks: int = 8, **more: object) -> PagedKVCacheManager:
    options = {"block_size": 2, "enable_prefix_caching": False, **more}
    return PagedKVCacheManager(num_blocks=num_blocks, num_host_blocks=num_host_blocks, **options)  # type: ignore[arg-type]


def swap(manager: KVCacheManager, request: FakeRequest, num_computed: int | None = None) -> bool:
    """Preempt a request."""
    is_swapped = manager.swap_out(request, request.num_tokens if num_computed is None else num_computed)
    manager.free(request)
    return is_swapped


def copies(manager: KVCacheManager) -> list[tuple[list[int], list[int], bool, int]]:
    return [(t.block_ids.tolist(), t.host_block_ids.tolist(), t.to_host, t.group) for t in manager.take_transfers()]


def host(manager: KVCacheManager) -> KVCacheUsage:
    return manager.inspect().host


# What comes back


@pytest.mark.parametrize("skips", [True, False])
def test_whole_blocks_go_and_come_back_to_new_blocks_whether_the_request_reads_the_cache_or_not(skips: bool) -> None:
    manager = manager_of()
    request = FakeRequest("a", [1, 2, 3, 4, 5], skip_prefix_cache=skips)
    assert start(manager, request) == (0, [1, 2, 3])
    assert swap(manager, request)
    assert host(manager) == (6, 8)
    assert manager.usage == (8, 8)
    start(manager, FakeRequest("b", [9, 9]))
    assert manager.lookup(request) == Hit(4, swapped=4)
    hit, blocks = start(manager, request)
    assert (hit, len(blocks)) == (4, 3)
    assert copies(manager) == [([1, 2], [0, 1], True, 0), (blocks[:2], [0, 1], False, 0)]
    assert host(manager) == (8, 8)
    assert copies(manager) == []


def test_a_token_is_always_left_to_compute() -> None:
    manager = manager_of()
    request = FakeRequest("a", [1, 2, 3, 4])
    start(manager, request)
    assert swap(manager, request)
    assert manager.lookup(request) == Hit(2, swapped=2)
    request.tokens.append(5)
    assert manager.lookup(request) == Hit(4, swapped=4)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_a_request_that_host_memory_cannot_hold_whole_stays_as_it_is(num_host_blocks: int) -> None:
    manager = manager_of(num_host_blocks=num_host_blocks)
    request = FakeRequest("a", [1, 2, 3, 4, 5])
    _, blocks = start(manager, request)
    assert not manager.swap_out(request, 5)
    assert table(manager, request) == blocks
    assert copies(manager) == []
    assert host(manager) == (num_host_blocks, num_host_blocks)
    manager.free(request)
    assert manager.lookup(request) == Hit(0)


def test_less_than_a_block_is_not_worth_a_copy() -> None:
    manager = manager_of()
    request = FakeRequest("a", [1])
    start(manager, request)
    assert not swap(manager, request)
    assert host(manager) == (8, 8)


def test_a_manager_without_host_memory_refuses_and_has_nothing_to_copy() -> None:
    manager = manager_of(num_host_blocks=0)
    request = FakeRequest("a", [1, 2])
    start(manager, request)
    assert not swap(manager, request)
    manager.forget_swapped(request)
    assert manager.take_transfers() == ()


def test_forgotten_requests_start_anew_and_an_id_that_is_used_again_finds_nothing() -> None:
    manager = manager_of()
    old, new = FakeRequest("a", [1, 2, 3]), FakeRequest("a", [1, 2, 3])
    start(manager, old)
    assert swap(manager, old)
    assert manager.lookup(new) == Hit(0)
    manager.forget_swapped(new)
    assert host(manager) == (7, 8)
    manager.forget_swapped(old)
    manager.forget_swapped(old)
    assert host(manager) == (8, 8)
    assert manager.lookup(old) == Hit(0)


def test_who_swaps_out_under_an_id_that_was_never_forgotten_takes_its_place() -> None:
    manager = manager_of(num_host_blocks=2)
    old, new = FakeRequest("a", [1, 2, 3, 4]), FakeRequest("a", [5, 6, 7, 8])
    for request in (old, new):
        start(manager, request)
        assert swap(manager, request)
    assert (manager.lookup(old).tokens, manager.lookup(new).tokens) == (0, 2)
    assert host(manager) == (0, 2)


def test_reset_forgets_what_was_swapped_out_too() -> None:
    manager = manager_of(enable_prefix_caching=True)
    request = FakeRequest("a", [1, 2, 3])
    start(manager, request)
    assert swap(manager, request)
    assert manager.reset()
    assert manager.lookup(request) == Hit(0)
    assert host(manager) == (8, 8)


def test_a_hit_that_is_no_longer_there_has_to_be_looked_up_again() -> None:
    manager = manager_of()
    request = FakeRequest("a", [1, 2, 3])
    start(manager, request)
    assert swap(manager, request)
    hit = manager.lookup(request)
    manager.forget_swapped(request)
    with pytest.raises(RuntimeError, match="look the request up again"):
        manager.allocate(request, 3, hit)
    assert manager.usage == (8, 8)


def test_who_lacks_blocks_keeps_what_was_swapped_out() -> None:
    manager = manager_of(num_blocks=3)
    request = FakeRequest("a", [1, 2, 3, 4, 5])
    start(manager, request)
    assert swap(manager, request)
    copies(manager)
    start(manager, FakeRequest("b", [6]))
    assert manager.allocate(request, 5, manager.lookup(request)) is None
    assert manager.lookup(request) == Hit(4, swapped=4)
    assert copies(manager) == []


def test_blocks_of_host_memory_serve_two_requests_in_one_step() -> None:
    """The copy back comes first, so the second request may overwrite what the first one had."""
    manager = manager_of(num_blocks=4, num_host_blocks=1)
    first, second = FakeRequest("a", [1, 2, 3]), FakeRequest("b", [4, 5, 6])
    start(manager, first)
    assert swap(manager, first)
    start(manager, second)
    start(manager, first)
    assert swap(manager, second)
    assert [to_host for _, _, to_host, _ in copies(manager)] == [True, False, True]


# With the prefix cache


def test_what_the_prefix_cache_still_has_is_shared_and_not_copied() -> None:
    manager = manager_of(enable_prefix_caching=True)
    request, other = FakeRequest("a", [1, 2, 3, 4, 5, 6, 7]), FakeRequest("b", [1, 2, 9])
    _, blocks = start(manager, request)
    start(manager, other)  # keeps the first block
    assert swap(manager, request)
    copies(manager)
    start(manager, FakeRequest("c", [8] * 12))  # evicts the rest
    assert manager.lookup(request) == Hit(6, swapped=4)
    manager.free(FakeRequest("c", []))
    hit, again = start(manager, request)
    assert (hit, again[0]) == (6, blocks[0])
    assert copies(manager) == [(again[1:3], [1, 2], False, 0)]


def test_a_hit_of_the_prefix_cache_that_is_as_long_costs_no_copy() -> None:
    manager = manager_of(enable_prefix_caching=True)
    request = FakeRequest("a", [1, 2, 3, 4, 5])
    _, blocks = start(manager, request)
    assert swap(manager, request)
    copies(manager)
    assert manager.lookup(request) == Hit(4)
    assert start(manager, request)[1][:2] == blocks[:2]
    assert copies(manager) == []
    assert host(manager) == (8, 8)


def test_what_came_back_can_be_found_by_others_and_is_told_once() -> None:
    manager = manager_of(num_blocks=4, enable_prefix_caching=True, records_events=True)
    request = FakeRequest("a", [1, 2, 3, 4, 5])
    start(manager, request)
    assert swap(manager, request)
    evictor = FakeRequest("b", [8] * 8)
    start(manager, evictor)
    manager.free(evictor)
    manager.take_events()
    start(manager, request)
    stored = [event for event in manager.take_events() if type(event).__name__ == "BlockStored"]
    assert [event.token_ids for event in stored] == [(1, 2), (3, 4)]
    assert manager.lookup(FakeRequest("c", [1, 2, 3, 4, 6])) == Hit(4)
    decode(manager, request, 6, 7, 8)  # what comes after is published behind it


def test_the_prefix_version_moves_with_what_a_lookup_finds() -> None:
    manager = manager_of(enable_prefix_caching=False)
    request = FakeRequest("a", [1, 2, 3])
    start(manager, request)
    versions = [manager.prefix_version]
    swap(manager, request)
    versions.append(manager.prefix_version)
    manager.forget_swapped(request)
    versions.append(manager.prefix_version)
    assert len(set(versions)) == 3


# Windows


def test_of_a_window_group_only_what_later_queries_read_is_copied() -> None:
    manager = manager_of(num_blocks=20, group_windows=(3, None))
    request = FakeRequest("a", list(range(9)))
    start(manager, request)
    window, full = table(manager, request, 0), table(manager, request, 1)
    assert swap(manager, request)
    assert copies(manager) == [([window[3]], [0], True, 0), (full[:4], [1, 2, 3, 4], True, 1)]
    hit, again = start(manager, request)
    assert (hit, again[:3]) == (8, [0, 0, 0])


def test_a_window_keeps_what_a_request_reads_that_goes_on_at_the_edge_of_a_block() -> None:
    """Position 4 reads 0 and later, position 5 only 1 and later: block 0 must stay until the next edge."""
    manager = manager_of(num_blocks=20, block_size=1, group_windows=(5,))
    coarse = manager_of(num_blocks=20, block_size=4, group_windows=(6,))
    for made, length in ((manager, 9), (coarse, 10)):
        request = FakeRequest("a", list(range(length)))
        start(made, request)
        assert swap(made, request)
        request.tokens.append(1)
        assert made.lookup(request).tokens == length // made._block_size * made._block_size


# Any order


@dataclass
class Live:
    request: FakeRequest
    chain: TokenChain
    num_computed: int = 0
    is_running: bool = False
    num_swapped: int = 0  # blocks at the start that host memory should have; 0 = nothing


class SwapMachine(RuleBasedStateMachine):
    """Requests with common prefixes come, run, are swapped out or dropped, and go; copies are made when a step runs.

    The model computes what each position holds, and checks before a position is computed that all it reads is right.
    """

    @initialize(
        block_size=st.integers(1, 4),
        windows=st.lists(st.none() | st.integers(1, 7), min_size=1, max_size=2),
        caching=st.booleans(),
        num_tokens=st.sampled_from([14, 18, 24]),
        num_host_blocks=st.integers(2, 24),
    )
    def make(
        self, block_size: int, windows: list[int | None], caching: bool, num_tokens: int, num_host_blocks: int
    ) -> None:
        self.size, self.windows, self.num_host = block_size, windows, num_host_blocks
        self.num_blocks = -(-num_tokens // block_size) * len(windows)
        self.manager = PagedKVCacheManager(
            num_blocks=self.num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            group_windows=windows,
            num_host_blocks=num_host_blocks,
            records_events=True,
        )
        self.memory = BlockMemory(self.num_blocks, block_size, num_host_blocks)
        self.live: dict[str, Live] = {}

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        num_zeros=st.sampled_from([0, 4, 6, 8]),
        tail=st.lists(st.integers(0, 1), max_size=4),
        salt=st.sampled_from([None] * 5 + ["s"]),
        skips=st.sampled_from([False] * 4 + [True]),
    )
    def arrive(self, num_zeros: int, tail: list[int], salt: str | None, skips: bool) -> None:
        name = next(name for name in "abcd" if name not in self.live)
        request = FakeRequest(name, [0] * num_zeros + [1, *tail], cache_salt=salt, skip_prefix_cache=skips)
        live = self.live[name] = Live(request, TokenChain(repr(salt)))
        live.chain.extend(request.tokens)
        self.admit(live)

    @precondition(lambda self: any(not live.is_running for live in self.live.values()))
    @rule(data=st.data())
    def admit_again(self, data: st.DataObject) -> None:
        self.admit(self.draw(data, is_running=False))

    def admit(self, live: Live) -> None:
        request = live.request
        before = self.state()
        hit = self.manager.lookup(request)
        assert self.state() == before
        assert hit == self.expected_hit(live)
        allocation = self.manager.allocate(request, request.num_tokens, hit)
        if allocation is None:
            assert self.state() == before
            assert self.manager.usage.num_free_blocks < len(self.windows) * -(-request.num_tokens // self.size)
            return
        live.is_running, live.num_computed, live.num_swapped = True, hit.tokens, 0

    @precondition(lambda self: any(live.is_running for live in self.live.values()))
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data: st.DataObject, token: int) -> None:
        live = self.draw(data, is_running=True)
        if self.manager.allocate(live.request, live.request.num_tokens + 1) is not None:
            live.request.tokens.append(token)
            live.chain.extend([token])

    @precondition(lambda self: self.live)
    @rule(chunk=st.integers(3, 12), lag=st.sampled_from([0, 0, 1, 2]))
    def step(self, chunk: int, lag: int) -> None:
        """Copies, then K/V; what is committed may lag behind."""
        for transfer in self.manager.take_transfers():
            self.check_transfer(transfer)
            self.memory.transfer(transfer)
        for live in self.live.values():
            if live.is_running:
                self.compute(live, min(live.num_computed + chunk, live.request.num_tokens), lag)

    @precondition(lambda self: any(live.is_running for live in self.live.values()))
    @rule(data=st.data(), drops=st.sampled_from([False] * 5 + [True]), less=st.sampled_from([0] * 5 + [1]))
    def preempt(self, data: st.DataObject, drops: bool, less: int) -> None:
        live = self.draw(data, is_running=True)
        if drops:
            self.leave(live)
            return
        num_blocks = max(0, live.num_computed - less) // self.size
        before, num_free = self.state(), host(self.manager).num_free_blocks
        needed = sum(num_blocks - self.first_read(window, num_blocks) for window in self.windows)
        is_swapped = self.manager.swap_out(live.request, max(0, live.num_computed - less))
        if not less:
            assert is_swapped == (num_blocks > 0 and needed <= num_free)
        if not is_swapped:
            assert self.state() == before
        self.leave(live)
        live.num_swapped = num_blocks if is_swapped else 0

    @precondition(lambda self: len(self.live) > 2)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        live = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.manager.free(live.request)
        self.manager.forget_swapped(live.request)

    @precondition(lambda self: len(self.live) > 1 and not any(live.is_running for live in self.live.values()))
    @rule()
    def reset(self) -> None:
        assert self.manager.reset()
        for live in self.live.values():
            live.num_swapped = 0

    @invariant()
    def counts_are_right(self) -> None:
        self.manager.check_invariants()
        self.manager.take_events()
        held = sum(
            live.num_swapped - self.first_read(window, live.num_swapped)
            for live in self.live.values()
            for window in self.windows
        )
        assert host(self.manager) == (self.num_host - held, self.num_host)
        for live in self.live.values():
            tables = self.manager.block_ids(live.request)
            assert all(len(blocks) > 0 for blocks in tables) == live.is_running

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for live in self.live.values():
                self.manager.free(live.request)
                self.manager.forget_swapped(live.request)
            assert self.manager.usage == (self.num_blocks, self.num_blocks)
            assert host(self.manager) == (self.num_host, self.num_host)

    # The model

    def draw(self, data: st.DataObject, *, is_running: bool) -> Live:
        names = sorted(name for name, live in self.live.items() if live.is_running == is_running)
        return self.live[data.draw(st.sampled_from(names))]

    def state(self) -> object:
        tables = [[blocks.tolist() for blocks in self.manager.block_ids(live.request)] for live in self.live.values()]
        return self.manager.usage, self.manager.inspect(), tables

    def first_read(self, window: int | None, num_blocks: int) -> int:
        return 0 if window is None else max(0, num_blocks * self.size - window + 1) // self.size

    def expected_hit(self, live: Live) -> Hit:
        request = live.request
        twin = FakeRequest("twin", request.tokens, request.cache_salt, skip_prefix_cache=request.skip_prefix_cache)
        cached = self.manager.lookup(twin).tokens
        num_blocks = min(live.num_swapped, (request.num_tokens - 1) // self.size)
        if any(
            self.first_read(window, live.num_swapped) > self.first_read(window, num_blocks) for window in self.windows
        ):
            num_blocks = 0  # the window has moved on
        tokens = num_blocks * self.size
        return Hit(cached) if tokens <= cached else Hit(tokens, swapped=tokens - cached)

    def check_transfer(self, transfer: HostTransfer) -> None:
        assert transfer.block_ids.dtype == transfer.host_block_ids.dtype == np.int32
        assert len(transfer.block_ids) == len(transfer.host_block_ids) > 0
        assert 0 <= transfer.host_block_ids.min() <= transfer.host_block_ids.max() < self.num_host
        assert 0 < transfer.block_ids.min() <= transfer.block_ids.max() <= self.num_blocks

    def compute(self, live: Live, end: int, lag: int) -> None:
        tables = self.manager.block_ids(live.request)
        for group, (window, blocks) in enumerate(zip(self.windows, tables, strict=True)):
            for position in range(live.num_computed, end):
                first = 0 if window is None else max(0, position - window + 1)
                wrong = self.memory.first_wrong(group, blocks, first, live.chain.digests[:position])
                assert wrong is None, f"'{live.request.request_id}' reads what is not its own at position {wrong}"
                self.memory.write(group, blocks, position, live.chain.digests[position : position + 1])
        live.num_computed = end
        self.manager.commit(live.request, max(0, end - lag))

    def leave(self, live: Live) -> None:
        self.manager.free(live.request)
        live.is_running, live.num_computed = False, 0


SwapMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestSwapMachine = SwapMachine.TestCase
