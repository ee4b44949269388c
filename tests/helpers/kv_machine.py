"""A state machine over a K/V cache manager, against a model in plain Python.

`run_state_machine_as_test(ManagerMachine, settings=...)` runs one for longer than the tests do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import pytest
from eviction_models import RULES
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_requests import FakeRequest, Manager
from tokenyard.interfaces.kv_cache import Allocation, ExtraKey, Hit, KVCacheInspection, KVCacheUsage
from tokenyard.kv_cache import PagedKVCacheManager, RadixKVCacheManager
from tokenyard.kv_events import BlockRemoved, BlockStored, CacheCleared
from tokenyard.request import Retention

Name: TypeAlias = tuple[object, ...]  # what a block or a slot holds: KV group, root, tokens so far, extra keys

EXTRA_KEYS: list[tuple[ExtraKey, ...]] = [
    (),
    (ExtraKey("x", 0, 3),),
    (ExtraKey("y", 2, 5),),
    (ExtraKey("x", 0, 2), ExtraKey("y", 1, 4), ExtraKey("", 6, 6)),
]


PROMPTS = (  # a beginning of one of these, so that prefixes collide, and a tail
    (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    (0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1),
)
TAILS = ((), (), (0,), (1,), (1, 0, 1))


class _State(NamedTuple):
    usage: KVCacheUsage
    inspection: KVCacheInspection
    tables: list[list[list[int]]]


@dataclass
class _Live:
    """A request and what it should hold."""

    request: FakeRequest
    tables: list[list[int]] = field(default_factory=list)  # per KV group; empty while it waits
    valid_until: int = 0
    num_computed: int = 0  # tokens whose K/V is written
    num_committed: int = 0  # tokens for which `commit` was called
    old_hit: Hit | None = None

    @property
    def is_running(self) -> bool:
        return bool(self.tables)


class ManagerMachine(RuleBasedStateMachine):
    """Requests that share prefixes come, wait, run, grow, are preempted and go, in a pool that is too small.

    The model writes the name of every token into its block when it is computed, and checks before a token is computed
    that every block which its query reads says what it should.
    """

    seen: ClassVar[Counter[str]] = Counter()  # over all examples: how much happened

    manager: Manager

    @initialize(
        capacity=st.sampled_from([12, 24, 36]),
        block_size=st.integers(1, 4),
        windows=st.lists(st.none() | st.integers(1, 7), min_size=1, max_size=3),
        eviction=st.sampled_from(sorted(RULES)),
        share=st.sampled_from([0, 0.3, 1]),
        caching=st.sampled_from([True] * 5 + [False]),
    )
    def make(
        self,
        capacity: int,
        block_size: int,
        windows: list[int | None],
        eviction: str,
        share: float,
        caching: bool,
    ) -> None:
        self.start(capacity, block_size, windows, caching)
        self.manager = PagedKVCacheManager(
            num_blocks=self.num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            group_windows=windows,
            make_eviction=RULES[eviction][0],
            retention_share=share,
            records_events=True,
        )

    def start(self, capacity: int, block_size: int, windows: list[int | None], caching: bool) -> None:
        self.size, self.windows, self.caching = block_size, windows, caching
        self.num_blocks = capacity // block_size * len(windows)
        self.live: dict[str, _Live] = {}
        self.ended: list[FakeRequest] = []
        self.slots: dict[tuple[int, int], Name] = {}  # (block, offset) -> what was written there
        self.published: dict[int, Name] = {}  # block -> what it can be found as
        self.announced: set[tuple[bytes, int]] = set()  # (hash, group), from the events alone

    # Requests come and go

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 12),
        tail=st.sampled_from(TAILS),
        root=st.sampled_from([(None, None)] * 6 + [("s", None), (None, "s")]),
        extra_keys=st.sampled_from([()] * 4 + EXTRA_KEYS),
        skips=st.sampled_from([False] * 5 + [True]),
        retention=st.sampled_from(["low", "normal", "normal", "high"]),
        waits=st.booleans(),
    )
    def arrive(
        self,
        prompt: tuple[int, ...],
        length: int,
        tail: tuple[int, ...],
        root: tuple[str | None, str | None],
        extra_keys: tuple[ExtraKey, ...],
        skips: bool,
        retention: Retention,
        waits: bool,
    ) -> None:
        request = FakeRequest(
            next(name for name in "abcdef" if name not in self.live),  # ids are used again
            [*prompt[:length], *tail],
            cache_salt=root[0],
            lora_name=root[1],
            extra_keys=extra_keys,
            skip_prefix_cache=skips,
            retention=retention,
        )
        live = self.live[request.request_id] = _Live(request)
        if not waits:
            self._start(live, self.manager.lookup(request), 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        live = self.live.pop(data.draw(st.sampled_from(sorted(self.live))))
        self.manager.free(live.request)
        self.manager.free(live.request)
        self.ended = [*self.ended[-3:], live.request]

    @precondition(lambda self: any(live.is_running for live in self.live.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        live = self._draw(data, is_running=True)
        self.manager.free(live.request)
        self.live[live.request.request_id] = _Live(live.request)

    @precondition(lambda self: len(self.live) == 1 or (self.published and not self.live))
    @rule()
    def reset(self) -> None:
        is_held = any(block for live in self.live.values() for table in live.tables for block in table)
        assert self.manager.reset() == (not is_held)
        if not is_held:
            self.published.clear()

    # Looking up and allocating

    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        requests = [live.request for live in self.live.values()] + self.ended
        if requests:
            request = data.draw(st.sampled_from(requests))
            before = self._state()
            hit = self.manager.lookup(request)
            assert hit.tokens == self._expected_hit(request)
            assert self._state() == before
            if request.request_id in self.live and self.live[request.request_id].request is request:
                self.live[request.request_id].old_hit = hit

    @precondition(lambda self: any(not live.is_running for live in self.live.values()))
    @rule(num_lookahead=st.sampled_from([0, 0, 1, 3]))
    def admit(self, num_lookahead: int) -> None:
        """In order of arrival, until one does not fit."""
        for live in [live for live in self.live.values() if not live.is_running]:
            self._start(live, self.manager.lookup(live.request), num_lookahead)
            if not live.is_running:
                return

    @precondition(lambda self: any(not live.is_running and live.old_hit for live in self.live.values()))
    @rule(data=st.data())
    def admit_with_an_old_hit(self, data: st.DataObject) -> None:
        live = self._draw(data, is_running=False)
        hit = live.old_hit
        if hit is None:
            return
        if hit.tokens == 0 or self._is_hit(live.request, hit.tokens // self.size):
            self._start(live, hit, 0)
            return
        before = self._state()
        with pytest.raises(RuntimeError, match="look the request up again"):
            self.manager.allocate(live.request, live.request.num_tokens, hit)
        assert self._state() == before

    @precondition(lambda self: any(live.is_running for live in self.live.values()))
    @rule(data=st.data(), token=st.integers(0, 1), num_lookahead=st.sampled_from([0, 0, 2]))
    def grow(self, data: st.DataObject, token: int, num_lookahead: int) -> None:
        live = self._draw(data, is_running=True)
        before, num_free = self._state(), self._num_free()
        num_tokens = live.request.num_tokens + 1
        num_new = max(0, -(-(num_tokens + num_lookahead) // self.size) - len(live.tables[0]))
        allocation = self.manager.allocate(live.request, num_tokens, num_lookahead=num_lookahead)
        assert (allocation is not None) == (num_new * len(self.windows) <= num_free)
        if allocation is None:
            assert self._state() == before
            return
        assert [len(new) for new in allocation.new_block_ids] == [num_new] * len(self.windows)
        self._take_in(live, allocation, num_hit=0)
        live.request.tokens.append(token)

    # Computing and committing

    @rule(chunk=st.integers(1, 12))
    def step(self, chunk: int) -> None:
        for live in self.live.values():
            if live.is_running:
                self._compute(live, chunk)
                self._commit(live, live.num_computed)

    @precondition(lambda self: any(live.is_running for live in self.live.values()))
    @rule(data=st.data(), chunk=st.integers(1, 8), lag=st.sampled_from([0, 1, 3]))
    def step_in_flight(self, data: st.DataObject, chunk: int, lag: int) -> None:
        """One request computes ahead of its commits."""
        live = self._draw(data, is_running=True)
        self._compute(live, chunk)
        self._commit(live, max(live.num_committed, live.num_computed - lag))

    # What must hold at any moment

    @invariant()
    def manager_and_model_agree(self) -> None:
        self.seen["rules"] += 1
        self.manager.check_invariants()
        held = Counter(block for live in self.live.values() for table in live.tables for block in table if block)
        inspection = self.manager.inspect()
        assert inspection.ref_counts == {block: held[block] for block in range(1, self.num_blocks + 1)}
        assert len(inspection.cached_hashes) == len(set(self.published.values()))
        assert self.manager.usage == (self._num_free(), self.num_blocks)
        for live in self.live.values():
            tables = [table.tolist() for table in self.manager.block_ids(live.request)]
            assert tables == (live.tables or [[] for _ in self.windows])

    @invariant()
    def events_tell_what_can_be_found(self) -> None:
        for event in self.manager.take_events():
            match event:
                case BlockStored(block_hash=digest, group=group):
                    assert (digest, group) not in self.announced
                    self.announced.add((digest, group))
                case BlockRemoved(block_hash=digest, group=group):
                    self.announced.remove((digest, group))
                case CacheCleared():
                    assert self.announced
                    self.announced.clear()
        keys = {digest + (group.to_bytes(2, "little") if group else b"") for digest, group in self.announced}
        assert keys == self.manager.inspect().cached_hashes

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for live in self.live.values():
            self.manager.free(live.request)
        self.manager.check_invariants()
        assert self.manager.usage == (self.num_blocks, self.num_blocks), "blocks leaked"
        assert self.manager.reset()
        assert self.manager.inspect().cached_hashes == frozenset()

    # The model

    def _draw(self, data: st.DataObject, *, is_running: bool) -> _Live:
        names = sorted(name for name, live in self.live.items() if live.is_running == is_running)
        return self.live[data.draw(st.sampled_from(names))]

    def _num_free(self) -> int:
        held = {block for live in self.live.values() for table in live.tables for block in table if block}
        return self.num_blocks - len(held)

    def _state(self) -> _State:
        tables = [[table.tolist() for table in self.manager.block_ids(live.request)] for live in self.live.values()]
        return _State(self.manager.usage, self.manager.inspect(), tables)

    def _start(self, live: _Live, hit: Hit, num_lookahead: int) -> None:
        request, num_hit = live.request, hit.tokens // self.size
        before, num_free = self._state(), self._num_free()
        num_new = max(0, -(-(request.num_tokens + num_lookahead) // self.size) - num_hit)
        held = {block for other in self.live.values() for table in other.tables for block in table}
        num_revived = self._num_revived(request, num_hit, held)
        allocation = self.manager.allocate(request, request.num_tokens, hit, num_lookahead)
        if allocation is None:
            assert num_new * len(self.windows) + num_revived > num_free, "refused although there was room"
            assert self._state() == before
            self.seen["refused"] += 1
            return
        self.seen["admitted"] += 1
        self.seen["admitted with a hit"] += num_hit > 0
        for group, block_ids in enumerate(allocation.new_block_ids):
            first = num_hit - self._num_reached(self.windows[group], num_hit)
            for index, block in enumerate(block_ids[:num_hit].tolist()):
                expected = None if index < first else self._block_name(request, group, index)
                assert self.published.get(block) == expected, "a hit on foreign content"
            assert len(block_ids) == num_hit + num_new
            assert not held & set(block_ids[num_hit:].tolist()), "a block that is held was handed out"
        live.tables = [[] for _ in self.windows]
        live.num_computed = live.num_committed = hit.tokens
        self._take_in(live, allocation, num_hit)

    def _num_revived(self, request: FakeRequest, num_hit: int, held: set[int]) -> int:
        """Free blocks that a hit takes, at most: of equal blocks, the manager chooses."""
        return sum(
            any(block not in held for block, name in self.published.items() if name == wanted)
            for group, window in enumerate(self.windows)
            for index in range(num_hit - self._num_reached(window, num_hit), num_hit)
            for wanted in [self._block_name(request, group, index)]
        )

    def _take_in(self, live: _Live, allocation: Allocation, num_hit: int) -> None:
        for table, block_ids in zip(live.tables, allocation.new_block_ids, strict=True):
            assert block_ids.dtype.name == "int32"
            table += block_ids.tolist()
            for block in block_ids[num_hit:].tolist():
                assert block, "block 0 was handed out"
                self.published.pop(block, None)
                for offset in range(self.size):
                    self.slots.pop((block, offset), None)
        assert allocation.valid_until_tokens == len(live.tables[0]) * self.size

    def _compute(self, live: _Live, chunk: int) -> None:
        for position in range(live.num_computed, min(live.num_computed + chunk, live.request.num_tokens)):
            for group, window in enumerate(self.windows):
                self._write(live, group, position)
                for read in range(0 if window is None else max(0, position - window + 1), position + 1):
                    block = live.tables[group][read // self.size]
                    found = self.slots.get((block, read % self.size))
                    assert found == self._slot_name(live.request, group, read), "a query reads what is not its own"
            live.num_computed = position + 1

    def _commit(self, live: _Live, num_tokens: int) -> None:
        self.manager.commit(live.request, num_tokens)
        for index in range(live.num_committed // self.size, num_tokens // self.size if self.caching else 0):
            for group, table in enumerate(live.tables):
                self.published[table[index]] = self._block_name(live.request, group, index)
        live.num_committed = num_tokens
        for group, window in enumerate(self.windows):
            if window is not None:
                passed = max(0, num_tokens - window + 1) // self.size
                live.tables[group][:passed] = [0] * passed

    def _write(self, live: _Live, group: int, position: int) -> None:
        block = live.tables[group][position // self.size]
        assert block, "a token would be written into block 0"
        assert block not in self.published, "a token would be written into cached content"
        self.slots[block, position % self.size] = self._slot_name(live.request, group, position)

    def _expected_hit(self, request: FakeRequest) -> int:
        limit = 0 if request.skip_prefix_cache else (request.num_tokens - 1) // self.size
        return next(count for count in range(limit, -1, -1) if self._is_hit(request, count)) * self.size

    def _is_hit(self, request: FakeRequest, num_blocks: int) -> bool:
        names = set(self.published.values())
        return all(
            self._block_name(request, group, index) in names
            for group, window in enumerate(self.windows)
            for index in range(num_blocks - self._num_reached(window, num_blocks), num_blocks)
        )

    def _num_reached(self, window: int | None, num_blocks: int) -> int:
        return num_blocks if window is None else min(num_blocks, max(1, -(-(window - 1) // self.size)))

    def _block_name(self, request: FakeRequest, group: int, index: int) -> Name:
        end = (index + 1) * self.size
        extras = tuple(extra for extra in request.extra_keys if extra.start < end and extra.end > extra.start)
        return group, request.cache_salt, request.lora_name, tuple(request.tokens[:end]), extras

    def _slot_name(self, request: FakeRequest, group: int, position: int) -> Name:
        extras = tuple(extra for extra in request.extra_keys if extra.start <= position and extra.end > extra.start)
        return group, request.cache_salt, request.lora_name, tuple(request.tokens[: position + 1]), extras


class RadixMachine(ManagerMachine):
    """The same over a prefix tree."""

    @initialize(
        capacity=st.sampled_from([12, 24, 36]),
        block_size=st.integers(1, 4),
        share=st.sampled_from([0, 0.3, 1]),
        caching=st.sampled_from([True] * 7 + [False]),
    )
    def make(self, capacity: int, block_size: int, share: float, caching: bool) -> None:  # type: ignore[override]
        self.start(capacity, block_size, [None], caching)
        self.manager = RadixKVCacheManager(
            num_blocks=self.num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            retention_share=share,
            records_events=True,
        )
