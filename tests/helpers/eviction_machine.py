"""State machines over eviction rules, against plain models of them."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

from eviction_models import RULES, SlowLevels, SlowRule
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tokenyard.interfaces import EvictionRule
from tokenyard.kv_cache.retention import RetentionEviction

LOW, NORMAL, HIGH = 1, 2, 3


class RuleMachine(RuleBasedStateMachine):
    """Blocks are popped, written, hit and given back; the model knows which one goes next."""

    seen: ClassVar[Counter[str]] = Counter()  # over all examples: how much happened

    free: EvictionRule
    model: SlowRule | SlowLevels

    @initialize(num_blocks=st.integers(2, 6), name=st.sampled_from(sorted(RULES)))
    def make(self, num_blocks: int, name: str) -> None:
        make, make_model = RULES[name]
        self.start(num_blocks, make(num_blocks), make_model(num_blocks))

    def start(self, num_blocks: int, free: EvictionRule, model: SlowRule | SlowLevels) -> None:
        self.free, self.model = free, model
        self.blocks = range(1, num_blocks + 1)
        self.counts = dict.fromkeys(self.blocks, 0)
        self.written: set[int] = set()

    def drawn(self, data: st.DataObject, blocks: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=4, unique=True))

    @rule(count=st.integers(0, 5))
    def pop(self, count: int) -> None:
        count = min(count, len(self.free))
        expected = self.model.order()[:count]
        assert self.free.pop(count) == expected == self.model.pop(count)
        self.seen["evicted"] += len(self.written & set(expected))
        self.written -= set(expected)
        self.counts.update(dict.fromkeys(expected, 1))

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.drawn(data, [one for one in self.blocks if self.counts[one]])
        for one in blocks:
            self.counts[one] -= 1
        freed = [one for one in blocks if not self.counts[one]]
        self.free.append(freed)
        self.model.append(freed)

    @precondition(lambda self: self.written)
    @rule(data=st.data(), level=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]))
    def hit(self, data: st.DataObject, level: int) -> None:
        blocks = self.drawn(data, sorted(self.written))
        for one in blocks:
            if not self.counts[one]:
                self.free.remove(one)
                self.model.remove(one)
            self.counts[one] += 1
        self.tell_hit(blocks, level)
        self.seen["hits"] += 1

    @precondition(lambda self: any(count and one not in self.written for one, count in self.counts.items()))
    @rule(data=st.data(), level=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]))
    def write(self, data: st.DataObject, level: int) -> None:
        blocks = self.drawn(data, [one for one in self.blocks if self.counts[one] and one not in self.written])
        self.written |= set(blocks)
        self.tell_written(blocks, level)

    @precondition(lambda self: any(count and one in self.written for one, count in self.counts.items()))
    @rule(data=st.data(), level=st.sampled_from([LOW, NORMAL, HIGH]))
    def write_again(self, data: st.DataObject, level: int) -> None:
        """Another content, without having been popped in between."""
        blocks = self.drawn(data, [one for one in self.blocks if self.counts[one] and one in self.written])
        self.tell_written(blocks, level)

    @rule(
        count=st.integers(1, 4),
        level=st.sampled_from([LOW, NORMAL, NORMAL, HIGH]),
        order=st.randoms(use_true_random=False),
    )
    def serve(self, count: int, level: int, order: Random) -> None:
        """A request comes, computes and goes, whose last block is not full."""
        count = min(count, len(self.free))
        blocks = self.model.order()[:count]
        self.pop(count)
        self.written |= set(blocks[:-1])
        self.tell_written(blocks[:-1], level)
        order.shuffle(blocks)
        self.counts.update(dict.fromkeys(blocks, 0))
        self.free.append(blocks)
        self.model.append(blocks)

    @invariant()
    def rule_and_model_agree(self) -> None:
        assert [one for one in range(len(self.counts) + 1) if one in self.free] == sorted(self.model.order())
        assert len(self.free) == len(self.model.order())

    def teardown(self) -> None:
        if hasattr(self, "counts"):
            assert self.free.pop(len(self.free)) == self.model.order()

    def tell_hit(self, blocks: list[int], level: int) -> None:
        self.free.on_hit(blocks)
        assert isinstance(self.model, SlowRule)
        self.model.on_hit(blocks)

    def tell_written(self, blocks: list[int], level: int) -> None:
        self.free.on_written(blocks)
        assert isinstance(self.model, SlowRule)
        self.model.on_written(blocks)


class PlainRuleMachine(RuleMachine):
    @rule()
    def clear(self) -> None:
        self.free.on_cleared()
        assert isinstance(self.model, SlowRule)
        self.model.on_cleared()
        self.written.clear()


class RetentionMachine(RuleMachine):
    """The same with levels, over a rule that was in use before."""

    @initialize(
        num_blocks=st.integers(2, 6),
        name=st.sampled_from(sorted(RULES)),
        share=st.sampled_from([0, 0.3, 0.5, 1]),
        num_before=st.integers(0, 2),
    )
    def make(self, num_blocks: int, name: str, share: float, num_before: int) -> None:  # type: ignore[override]
        make, make_model = RULES[name]
        model = SlowLevels(num_blocks, make_model, int(num_blocks * share))
        normal = make(num_blocks)
        before = normal.pop(num_before)
        assert before == model.pop(num_before)
        normal.on_written(before)
        model.write(before, NORMAL)
        freed = before[1:]
        normal.append(freed)
        model.append(freed)
        self.levels = RetentionEviction(num_blocks, make, normal, before, int(num_blocks * share))
        self.start(num_blocks, self.levels, model)
        self.written = set(before)
        self.counts.update(dict.fromkeys(before[:1], 1))
        self.most_high = int(num_blocks * share)

    @rule()
    def clear(self) -> None:
        assert isinstance(self.model, SlowLevels)
        self.model.empty = self.model.order()
        for level_rule in self.model.rules.values():
            level_rule.free.clear()
            level_rule.on_cleared()
        self.model.levels.clear()
        self.levels.on_cleared()
        self.written.clear()

    @invariant()
    def high_has_no_more_than_its_share(self) -> None:
        assert isinstance(self.model, SlowLevels)
        assert self.model.num_high() == self.levels.num_high <= self.most_high
        self.seen["full of high"] += 0 < self.most_high == self.model.num_high()

    def tell_hit(self, blocks: list[int], level: int) -> None:
        self.levels.hit(blocks, level)
        assert isinstance(self.model, SlowLevels)
        self.model.hit(blocks, level)

    def tell_written(self, blocks: list[int], level: int) -> None:
        self.levels.write(blocks, level)
        assert isinstance(self.model, SlowLevels)
        self.model.write(blocks, level)
