"""A state machine over BlockPool, against a model in plain Python."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tokenyard.kv_cache import BlockPool, LRUEviction
from tokenyard.kv_cache.invariants import check_pool
from tokenyard_plugins.eviction_fifo import FIFOEviction

CONTENTS = [bytes([letter]) * 32 for letter in b"abcd"]


class PoolMachine(RuleBasedStateMachine):
    """Blocks are popped, published, hit and released in any order; the model knows which one goes next."""

    seen: ClassVar[Counter[str]] = Counter()  # over all examples: how much happened

    @initialize(num_blocks=st.integers(3, 8), eviction=st.sampled_from(["lru", "fifo"]))
    def make(self, num_blocks: int, eviction: str) -> None:
        self.removed: list[bytes] = []
        make_eviction = FIFOEviction if eviction == "fifo" else LRUEviction
        self.pool = BlockPool(num_blocks, make_eviction=make_eviction, on_removed=self.removed.append)
        self.is_fifo = eviction == "fifo"
        self.free = list(range(1, num_blocks + 1))  # in the order of becoming free
        self.counts = dict.fromkeys(self.free, 0)
        self.contents: dict[int, bytes] = {}  # by block, the oldest content first

    def order(self) -> list[int]:
        """Free blocks, the next to go first."""
        empty = [block for block in self.free if block not in self.contents]
        if self.is_fifo:
            return empty + [block for block in self.contents if block in self.free]
        return empty + [block for block in self.free if block in self.contents]

    def blank(self) -> list[int]:
        """Held blocks to which something may be written."""
        return [block for block, count in self.counts.items() if count and block not in self.contents]

    @rule(count=st.integers(0, 5))
    def pop(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(RuntimeError, match="no free blocks"):
                self.pool.pop(count)
            return
        self.seen["blocks handed out"] += count
        expected, known = self.order()[:count], set(self.contents.values())
        self.removed.clear()
        assert self.pool.pop(count) == expected
        for block in expected:
            self.free.remove(block)
            self.contents.pop(block, None)
            self.counts[block] = 1
        assert sorted(self.removed) == sorted(known - set(self.contents.values()))

    @rule(content=st.sampled_from(CONTENTS))
    def hit(self, content: bytes) -> None:
        block = self.pool.find(content)
        assert (block is not None) == (content in self.contents.values())
        if block is not None:
            assert self.contents[block] == content
            self.pool.take([block])
            self.seen["hits"] += 1
            self.counts[block] += 1
            if block in self.free:
                self.free.remove(block)

    @precondition(lambda self: self.blank())
    @rule(contents=st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=3))
    def publish(self, contents: list[bytes]) -> None:
        pairs = list(zip(self.blank(), contents, strict=False))
        self.pool.publish([block for block, _ in pairs], [content for _, content in pairs])
        self.contents.update(reversed(pairs))

    @precondition(lambda self: any(self.counts.values()))
    @rule(order=st.randoms(use_true_random=False), share=st.sampled_from([0.3, 1.0]))
    def release(self, order: Random, share: float) -> None:
        held = [block for block, count in self.counts.items() if count]
        blocks = order.sample(held, max(1, int(len(held) * share)))
        self.pool.release(blocks)
        for block in blocks:
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free.append(block)

    @precondition(lambda self: len(self.contents) > 2)
    @rule()
    def clear(self) -> None:
        self.free = self.order()
        assert self.pool.clear() == bool(self.contents)
        self.contents.clear()

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.seen["rules"] += 1
        check_pool(self.pool, self.counts)
        assert self.pool.cached_hashes() == set(self.contents.values())
        for content in CONTENTS:
            assert sorted(self.pool.find_all(content)) == sorted(
                block for block, held in self.contents.items() if held == content
            )
