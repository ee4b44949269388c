"""EvictionContract: what an eviction rule must keep, whatever it evicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from tokenyard.errors import PluginError
from tokenyard.interfaces.eviction import COMPONENT_KIND, EvictionRule
from tokenyard.launch.eviction import eviction_rule_maker
from tokenyard.testing.contracts.base import AMPLE, Contract, Loaded, Shape, check_equal, expect, no_errors, seeded
from tokenyard.testing.contracts.traces import Operation, arrivals, play, shapes
from tokenyard.testing.contracts.watch import noting

if TYPE_CHECKING:
    from random import Random

_SEEDS = st.integers(0, 2**32 - 1)
_LENGTHS = st.sampled_from([2, 4, 8, 15, 30, 60])
_SIZES = st.sampled_from([1, 2, 3, 5, 8])


class EvictionContract(Contract):
    """Set `overrides = ["kv_cache.eviction=NAME"]`, with options `["kv_cache.eviction={name: NAME, OPTION: 1}"]`."""

    _kind = COMPONENT_KIND
    _choice = "kv_cache.eviction=NAME"

    def test_a_new_rule_has_every_block_in_order(self) -> None:
        """`eviction.starts_full`: blocks 1 to n are free, none has content, and they go in the order of their ids."""
        loaded = self.load()
        for num_blocks in (1, 2, 7):
            rule = _made(loaded, num_blocks)
            members = [block_id for block_id in range(num_blocks + 2) if block_id in rule]
            found = rule.pop(len(rule))
            expected = list(range(1, num_blocks + 1))
            expect(members == found == expected, "eviction.starts_full", f"{num_blocks} blocks: {members}, {found}")

    def test_blocks_are_neither_lost_nor_handed_out_twice(self) -> None:
        """`eviction.conservation`: under any calls it has just the blocks that are free, and pops only those."""
        loaded = self.load()

        def check(seed: int, length: int, num_blocks: int) -> None:
            _driven(loaded, seed, length, num_blocks)

        self.for_all(check, _SEEDS, _LENGTHS, _SIZES)

    def test_blocks_without_content_go_first(self) -> None:
        """`eviction.empty_first`: no content is lost while a free block has none."""
        rule = _made(self.load(), 4)
        with no_errors("eviction.raises"):
            written, blank = rule.pop(2), rule.pop(2)
            rule.on_written(written)
            rule.append(written)
            rule.append(blank)
            found = rule.pop(2)
        expect(set(found) == set(blank), "eviction.empty_first", f"{found} went first; {blank} have no content")

    def test_too_many_are_refused(self) -> None:
        """`eviction.too_many`: RuntimeError for more than are free, and nothing has changed."""
        rule = _made(self.load(), 3)
        with no_errors("eviction.raises"):
            held = rule.pop(1)
        try:
            found = rule.pop(3)
        except RuntimeError:
            left = rule.pop(len(rule))
            expect(len(left) == 2 and not set(left) & set(held), "eviction.too_many", f"only {left} are left of 2")
        else:
            expect(False, "eviction.too_many", f"pop(3) gave {found} where 2 were free")

    def test_the_same_calls_evict_the_same(self) -> None:
        """`eviction.deterministic`: two rules that were told the same hand out the same blocks."""
        loaded = self.load()
        for seed in range(self.max_examples):  # an example that cannot be repeated has no simplest form
            runs = [_driven(loaded, seed, 10 + seed, num_blocks=5).handed_out for _ in range(2)]
            expect(runs[0] == runs[1], "eviction.deterministic", f"{runs[0]} in one run and {runs[1]} in the other")

    def test_many_at_once_are_the_same_as_one_after_the_other(self) -> None:
        """`eviction.one_order`: `pop(n)` gives what n times `pop(1)` would give."""
        loaded = self.load()

        def check(seed: int, length: int, num_blocks: int) -> None:
            one, other = (_driven(loaded, seed, length, num_blocks).rule for _ in range(2))
            at_once = one.pop(len(one))
            singly = [block_id for _ in range(len(other)) for block_id in other.pop(1)]
            expect(at_once == singly, "eviction.one_order", f"{at_once} at once, {singly} one after the other")

        self.for_all(check, _SEEDS, _LENGTHS, _SIZES)

    def test_it_reads_no_clock(self) -> None:
        """`eviction.no_clock`: what happened decides, not when: a replay must evict the same."""
        loaded, clocks = self.load(), list[str]()

        def check(seed: int, length: int, num_blocks: int) -> None:
            with noting(clocks, []):
                _driven(loaded, seed, length, num_blocks)
            expect(not clocks, "eviction.no_clock", f"it calls {', '.join(clocks)}")

        self.for_all(check, _SEEDS, _LENGTHS, _SIZES)

    def test_tokens_do_not_depend_on_what_is_evicted(self) -> None:
        """`eviction.same_tokens`: in an engine, whatever it evicts, each request has the tokens of an ample pool."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("eviction.raises"):
                small, ample = play(loaded.harness(shape), trace), play(loaded.harness(AMPLE), trace)
            check_equal("eviction.same_tokens", small, ample, "a small and an ample pool differ")

        self.for_all(check, arrivals(), shapes())


class _RuleDriver:
    """Calls a rule as a block pool does, and keeps which blocks are free and which have content."""

    def __init__(self, rule: EvictionRule, num_blocks: int) -> None:
        self.rule = rule
        self.handed_out: list[list[int]] = []
        self._blocks = range(1, num_blocks + 1)
        self._free = set(self._blocks)
        self._contents: set[int] = set()

    def play(self, draw: Random, length: int) -> None:
        calls = (self._serve, self._hold, self._hit, self._rewrite, self._clear)
        weights = (8, 3, 5, 1, 0.3)
        for _ in range(length):
            (call,) = draw.choices(calls, weights)
            call(draw)
            self.check()

    def _serve(self, draw: Random) -> None:
        """A request comes, computes and goes; its last block is not full."""
        blocks = self._pop(draw.randint(1, 4))
        self._write(blocks[:-1])
        self._release(blocks[::-1])

    def _hold(self, draw: Random) -> None:
        """Some blocks are handed out or given back, full or not."""
        held = [block_id for block_id in self._blocks if block_id not in self._free]
        if held and draw.random() < 0.6:
            self._release(draw.sample(held, draw.randint(1, len(held))))
        else:
            blocks = self._pop(draw.randint(0, 2))
            self._write(blocks[: draw.randint(0, 2)])

    def _hit(self, draw: Random) -> None:
        cached = sorted(self._contents)
        blocks = draw.sample(cached, draw.randint(1, len(cached))) if cached else []
        for block_id in blocks:
            if block_id in self._free:
                self.rule.remove(block_id)
                self._free.remove(block_id)
        if blocks:
            self.rule.on_hit(blocks)
        if draw.random() < 0.7:
            self._release(blocks)

    def _rewrite(self, draw: Random) -> None:
        """A retention level that changed: a block that is held starts anew here."""
        held = [block_id for block_id in self._blocks if block_id not in self._free]
        if held:
            self._write(draw.sample(held, 1))

    def _clear(self, draw: Random) -> None:
        self.rule.on_cleared()
        self._contents.clear()

    def _pop(self, count: int) -> list[int]:
        count = min(count, len(self._free))
        num_empty = min(count, len(self._free - self._contents))
        found = self.rule.pop(count)
        self.handed_out.append(found)
        is_right = len(found) == count == len(set(found)) and set(found) <= self._free
        expect(is_right, "eviction.conservation", f"pop({count}) gave {found}; free: {sorted(self._free)}")
        lost = [block_id for block_id in found if block_id in self._contents]
        expect(
            found[num_empty:] == lost,
            "eviction.empty_first",
            f"pop({count}) gave {found}, of which {lost} have content; {num_empty} of so many had none",
        )
        self._free -= set(found)
        self._contents -= set(found)
        return found

    def _write(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.rule.on_written(block_ids)
            self._contents |= set(block_ids)

    def _release(self, block_ids: Sequence[int]) -> None:
        self.rule.append(block_ids)
        self._free |= set(block_ids)

    def check(self) -> None:
        members = {block_id for block_id in range(len(self._blocks) + 2) if block_id in self.rule}
        is_right = members == self._free and len(self.rule) == len(self._free)
        what = f"it has {sorted(members)}, of length {len(self.rule)}; free: {sorted(self._free)}"
        expect(is_right, "eviction.conservation", what)


def _made(loaded: Loaded, num_blocks: int) -> EvictionRule:
    make = eviction_rule_maker(loaded.config.kv_cache, loaded.catalogue)
    if make is None:
        raise PluginError(f"eviction '{loaded.config.kv_cache.eviction}' is provided by no plugin")
    return make(num_blocks)


def _driven(loaded: Loaded, seed: int, length: int, num_blocks: int) -> _RuleDriver:
    """A rule after random calls."""
    driver = _RuleDriver(_made(loaded, num_blocks), num_blocks)
    with no_errors("eviction.raises"):
        driver.play(seeded(seed), length)
    return driver
