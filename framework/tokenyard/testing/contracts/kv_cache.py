"""KVCacheManagerContract: what a K/V cache manager must keep, whatever it evicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from tokenyard.descriptors import KVCacheManagerDescriptor
from tokenyard.interfaces.kv_cache import ExtraKey, Hit, KVCacheManager, KVCacheManagerContext
from tokenyard.launch.chosen import chosen
from tokenyard.launch.eviction import eviction_rule_maker
from tokenyard.parts import make_part
from tokenyard.testing.contracts.base import AMPLE, Contract, Shape, check_equal, expect, no_errors
from tokenyard.testing.contracts.kv_calls import KVCall, make_calls, random_calls
from tokenyard.testing.contracts.kv_driver import DrivenRequest, KVDriver
from tokenyard.testing.contracts.traces import Operation, arrivals, play, shapes
from tokenyard.testing.contracts.watch import noting

if TYPE_CHECKING:
    from tokenyard.testing.contracts.base import Loaded

_SMALL = Shape(num_blocks=8, block_size=4, num_host_blocks=6)  # 32 tokens
_CALLS = st.builds(random_calls, st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 8, 15, 30, 60, 60]))


class KVCacheManagerContract(Contract):
    """Set `overrides = ["kv_cache=NAME"]`.

    `group_windows` are the K/V groups to test it with: the sliding window of each, None = full attention.
    `shares_prefixes = False` for a manager that never finds anything, as with `kv_cache.enable_prefix_caching=false`.
    `swaps = True` for one that takes K/V to host memory: then it must, where there is room.
    """

    _kind = "kv_cache"
    _choice = "kv_cache=NAME"

    group_windows: Sequence[int | None] = (None,)
    shares_prefixes: bool = True
    swaps: bool = False

    def driver(self, shape: Shape, loaded: Loaded | None = None) -> KVDriver:
        """A manager of that size, made by its factory, with a driver around it."""
        loaded = loaded or self.load()
        shape = shape if self.swaps else dataclasses.replace(shape, num_host_blocks=0)
        config = shape.applied(loaded.config).kv_cache
        context = KVCacheManagerContext(
            config=config,
            num_blocks=shape.num_blocks,
            num_host_blocks=shape.num_host_blocks,
            group_windows=tuple(self.group_windows),
            make_eviction=eviction_rule_maker(config, loaded.catalogue),
        )
        manager = make_part(
            chosen(loaded.catalogue, "kv_cache", config.name, KVCacheManagerDescriptor),
            KVCacheManager,
            lambda part: part.factory(config.options, context),
        )
        return KVDriver(
            manager,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            group_windows=self.group_windows,
            num_host_blocks=shape.num_host_blocks,
            swaps=self.swaps,
        )

    @pytest.mark.parametrize("block_size", [1, 2, 4])
    def test_blocks_are_neither_lost_nor_shared_wrongly(self, block_size: int) -> None:
        """`kv.sound`: under any calls counts add up, hits hold equal content, and at the end every block is free."""
        loaded = self.load()

        def check(calls: Sequence[KVCall], num_blocks: int, num_host_blocks: int) -> None:
            shape = Shape(num_blocks=num_blocks * len(self.group_windows), block_size=block_size)
            driver = self.driver(dataclasses.replace(shape, num_host_blocks=num_host_blocks), loaded)
            with no_errors("kv.raises"):
                make_calls(driver, calls)
            expect(driver.reset(), "kv.no_leak", "reset() returned False although every request was freed")

        self.for_all(check, _CALLS, st.sampled_from([3, 8, 16, 40]), st.sampled_from([5, 60]))

    def test_looking_up_changes_nothing(self) -> None:
        """`kv.lookup_pure`: the same blocks are handed out whether or not others looked something up between."""
        loaded = self.load()

        def check(calls: Sequence[KVCall]) -> None:
            plain, nosy = self.driver(_SMALL, loaded), self.driver(_SMALL, loaded)
            make_calls(plain, calls)
            make_calls(nosy, calls, num_lookups=2)
            expect(plain.handed_out == nosy.handed_out, "kv.lookup_pure", "look-ups change which blocks are handed out")

        self.for_all(check, _CALLS)

    def test_it_depends_on_nothing_but_its_calls(self) -> None:
        """`kv.deterministic`: which blocks are handed out depends neither on hashes of ids nor on anything else."""
        loaded = self.load()

        def check(calls: Sequence[KVCall]) -> None:
            runs = [(salt, self.driver(_SMALL, loaded)) for salt in ("", "", "-of-another-hash", "-x")]
            for salt, driver in runs:
                make_calls(driver, calls, salt=salt)
            first, *others = [driver.handed_out for _, driver in runs]
            expect(all(first == other for other in others), "kv.deterministic", "the same calls, and other blocks")

        self.for_all(check, _CALLS)

    def test_it_reads_no_clock(self) -> None:
        """`kv.no_wall_clock`: what is evicted and when does not depend on the time, so that it is so in simulation."""
        clocks: list[str] = []
        loaded = self.load()

        def check(calls: Sequence[KVCall]) -> None:
            driver = self.driver(_SMALL, loaded)
            with noting(clocks, []):
                make_calls(driver, calls)
            expect(not clocks, "kv.no_wall_clock", f"it reads a clock: {clocks[:1]}")

        self.for_all(check, _CALLS)

    def test_what_is_swapped_out_comes_back(self) -> None:
        """`kv.swapped_is_found`: from host memory, into other blocks, also for one that declines the prefix cache."""
        if not self.swaps:
            pytest.skip("it takes nothing to host memory")
        shape = dataclasses.replace(self._shape(num_tokens=32), num_host_blocks=8 * len(self.group_windows))
        for skips in (False, True):
            driver = self.driver(shape)
            request = DrivenRequest("a", list(range(12)), skip_prefix_cache=skips)
            self._fill(driver, request)
            expect(driver.swap_out(request), "kv.swap_refuses_only_when_short", "12 tokens did not fit into 32")
            self._fill(driver, DrivenRequest("other", list(range(100, 132))))  # takes every block of the device
            if not any(self.group_windows):
                expect(not driver.take_back(request), "kv.whole_or_nothing", "12 tokens fitted where none were free")
            driver.free(driver.live["other"])
            request.append(7)  # a token that was on its way
            expect(driver.take_back(request), "kv.whole_or_nothing", "13 tokens did not fit")
            self._fill_rest(driver, request)

    def test_names_of_blocks_tell_their_content(self) -> None:
        """`kv.prefix_hashes`: blocks of two requests have one name only where they begin alike up to their end."""
        driver = self.driver(self._shape(num_tokens=64))
        tokens = [[1] * 13, [1] * 8 + [2] * 5, [2] * 13, [1] * 5]
        requests = [
            DrivenRequest(f"{number}{salt}", list(one), cache_salt=salt)
            for number, one in enumerate(tokens)
            for salt in (None, "tenant")
        ]
        names = [driver.manager.prefix_hashes(request) for request in requests]
        for one, own in zip(requests, names, strict=True):
            most = (one.num_tokens - 1) // 4
            expect(len(own) <= most, "kv.prefix_hashes", f"{one} has {len(own)} names; {most} blocks may be found")
            for other, its in zip(requests, names, strict=True):
                for block, (name, another) in enumerate(zip(own, its, strict=False)):
                    is_same = one.chain.digests[4 * block + 3] == other.chain.digests[4 * block + 3]
                    expect(is_same or name != another, "kv.prefix_hashes", f"{one} and {other} share name {block}")

    def test_allocation_is_whole_or_nothing(self) -> None:
        """`kv.whole_or_nothing`: too few blocks: None, nothing changed, and what fits still fits."""
        driver = self.driver(self._shape(num_tokens=32))
        driver.admit(DrivenRequest("a", list(range(17))))
        big = DrivenRequest("b", list(range(100, 116)))
        expect(driver.admit(big) is None, "kv.whole_or_nothing", "16 tokens fitted where 12 were free")
        expect(
            driver.admit(DrivenRequest("c", list(range(8)))) is not None, "kv.whole_or_nothing", "8 tokens did not fit"
        )

    def test_a_hit_that_cannot_be_extended_is_not_taken(self) -> None:
        """`kv.whole_or_nothing`: hit blocks keep their counts when there is no room for the rest."""
        driver = self._filled([1] * 17)
        driver.admit(DrivenRequest("other", [7] * 13))
        expect(driver.admit(DrivenRequest("b", [1] * 30)) is None, "kv.whole_or_nothing", "it fitted")
        driver.check()

    def test_committed_blocks_are_found(self) -> None:
        """`kv.commit_findable`: full blocks that are committed serve the next request that begins alike."""
        self._needs_sharing()
        driver = self._filled(list(range(11)))
        for length, hit in ((11, 8), (8, 4), (20, 8), (4, 0)):
            found = driver.lookup(DrivenRequest("b", list(range(length)))).tokens
            expect(
                found == hit, "kv.commit_findable", f"{length} tokens, 8 committed: a hit of {found} instead of {hit}"
            )

    def test_what_is_not_committed_is_not_found(self) -> None:
        """`kv.only_committed`: blocks that were allocated but not written serve nobody."""
        driver = self.driver(self._shape(num_tokens=32))
        driver.admit(DrivenRequest("a", list(range(9))))
        found = driver.lookup(DrivenRequest("b", list(range(9))))
        expect(
            not found.tokens or found.pending, "kv.only_committed", f"a hit of {found.tokens} tokens nobody computed"
        )

    def test_freed_blocks_stay_findable_until_they_are_reused(self) -> None:
        """`kv.content_outlives_request`: a freed prefix is found again, and not when its blocks hold something else."""
        self._needs_sharing()
        driver = self._filled(list(range(9)))
        driver.free(driver.live["a"])
        again = driver.lookup(DrivenRequest("b", list(range(9)))).tokens
        expect(again == 8, "kv.content_outlives_request", f"a hit of {again} after the request was freed")
        self._fill(driver, DrivenRequest("c", list(range(100, 132))))  # takes every block
        driver.free(driver.live["c"])
        gone = driver.lookup(DrivenRequest("b", list(range(9)))).tokens
        expect(gone == 0, "kv.content_outlives_request", f"a hit of {gone} in blocks that were overwritten")

    def test_tenants_and_adapters_do_not_share(self) -> None:
        """`kv.separates`: salt, adapter and extra keys separate equal tokens; equal ones share."""
        tokens = list(range(9))
        image, other = (ExtraKey("image", 1, 3),), (ExtraKey("another", 1, 3),)
        variants = [
            DrivenRequest("plain", tokens),
            DrivenRequest("salt", tokens, cache_salt="tenant"),
            DrivenRequest("lora", tokens, lora_name="adapter"),
            DrivenRequest("image", tokens, extra_keys=image),
        ]
        driver = self.driver(self._shape(num_tokens=100))
        for request in variants:
            found = driver.lookup(request).tokens
            expect(found == 0, "kv.separates", f"'{request.request_id}' hits {found} tokens of another kind")
            self._fill(driver, request)
        found = driver.lookup(DrivenRequest("other", tokens, extra_keys=other)).tokens
        expect(found == 0, "kv.separates", f"another image hits {found} tokens")
        same = driver.lookup(DrivenRequest("same", tokens, extra_keys=image)).tokens
        expect(same == 8 or not self.shares_prefixes, "kv.separates", f"an equal image hits {same} tokens instead of 8")

    def test_a_request_may_decline_the_cache(self) -> None:
        """`kv.skip_prefix_cache`: a request that must compute every prompt token gets no hit."""
        driver = self._filled(list(range(9)))
        found = driver.lookup(DrivenRequest("b", list(range(9)), skip_prefix_cache=True)).tokens
        expect(found == 0, "kv.skip_prefix_cache", f"a hit of {found} tokens")

    def test_freeing_is_idempotent(self) -> None:
        """`kv.free_idempotent`: a request that holds nothing, or is unknown, is no error."""
        driver = self._filled(list(range(9)))
        request = driver.live["a"]
        with no_errors("kv.free_idempotent"):
            for one in (DrivenRequest("unknown", [1]), request, request):
                driver.free(one)
        usage = driver.manager.usage
        expect(usage.num_free_blocks == usage.num_total_blocks, "kv.no_leak", f"after free() the usage is {usage}")

    def test_reset_forgets_everything_or_nothing(self) -> None:
        """`kv.reset`: False while a block is referenced; else nothing is found any more."""
        driver = self._filled(list(range(9)))
        expect(not driver.reset(), "kv.reset", "it was reset while a request holds blocks")
        driver.free(driver.live["a"])
        expect(driver.reset(), "kv.reset", "it was not reset although nothing is held")
        found = driver.lookup(DrivenRequest("b", list(range(9)))).tokens
        expect(found == 0, "kv.reset", f"a hit of {found} tokens after reset()")

    def test_capacity_is_what_one_request_can_hold(self) -> None:
        """`kv.capacity`: a request of that many tokens fits the empty pool, a longer one does not."""
        driver = self.driver(self._shape(num_tokens=32))
        capacity = driver.manager.capacity_tokens()
        longer = DrivenRequest("longer", list(range(capacity + 1)))
        expect(driver.admit(longer) is None, "kv.capacity", f"{capacity + 1} tokens fitted into {capacity}")
        expect(
            driver.admit(DrivenRequest("a", list(range(capacity)))) is not None, "kv.capacity", f"{capacity} do not fit"
        )

    def test_block_tables_are_copies(self) -> None:
        """`kv.tables_are_copies`: what a caller does to an answer changes nothing."""
        driver = self._filled(list(range(9)))
        request = driver.live["a"]
        before = [table.tolist() for table in driver.manager.block_ids(request)]
        for table in driver.manager.block_ids(request):
            table[:] = 0
        after = [table.tolist() for table in driver.manager.block_ids(request)]
        expect(before == after, "kv.tables_are_copies", f"the tables became {after}")

    def test_lookahead_is_allocated_besides(self) -> None:
        """`kv.lookahead`: speculative tokens are given room, whole blocks of it."""
        driver = self.driver(self._shape(num_tokens=32))
        allocation = driver.manager.allocate(DrivenRequest("a", [1, 2, 3]), 3, Hit(0), 2)
        held = None if allocation is None else allocation.valid_until_tokens
        expect(held is not None and held >= 5, "kv.lookahead", f"3 tokens and 2 speculative ones: valid until {held}")

    def test_tokens_are_the_same_in_any_pool(self) -> None:
        """`kv.same_tokens`: under a real scheduler, pool size and block size change no request's tokens."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            more = len(self.group_windows)
            shape = shape.with_blocks(shape.num_blocks * more)
            with no_errors("kv.raises"):
                small = play(loaded.harness(shape, group_windows=self.group_windows), trace)
                ample = play(loaded.harness(AMPLE, group_windows=self.group_windows), trace)
            check_equal("kv.same_tokens", small, ample, "a small and an ample pool differ")

        self.for_all(check, arrivals(), shapes())

    # Helpers

    def _shape(self, *, num_tokens: int) -> Shape:
        return Shape(num_blocks=num_tokens // 4 * len(self.group_windows), block_size=4)

    def _filled(self, tokens: list[int]) -> KVDriver:
        """A pool of 32 tokens a group in which request `a` has computed and committed `tokens`."""
        driver = self.driver(self._shape(num_tokens=32))
        self._fill(driver, DrivenRequest("a", tokens))
        return driver

    def _fill(self, driver: KVDriver, request: DrivenRequest) -> None:
        expect(driver.admit(request) is not None, "kv.refuses_only_when_short", f"'{request.request_id}' did not fit")
        driver.compute(request, request.num_tokens)

    def _fill_rest(self, driver: KVDriver, request: DrivenRequest) -> None:
        expect(driver.compute(request, request.num_tokens), "kv.refuses_only_when_short", f"{request} did not fit")

    def _needs_sharing(self) -> None:
        if not self.shares_prefixes or not self.load().config.kv_cache.enable_prefix_caching:
            pytest.skip("it shares no prefixes")
