"""The eviction rules that ship: the same victims as plain models of them."""

from __future__ import annotations

import pytest
from eviction_machine import PlainRuleMachine, RetentionMachine
from eviction_models import RULES
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tokenyard.config import NO_OPTIONS
from tokenyard.errors import ConfigError
from tokenyard.interfaces import EvictionContext, EvictionRule
from tokenyard.testing import EngineHarness
from tokenyard_plugins.eviction_fifo import FIFOEviction
from tokenyard_plugins.eviction_lfu import LFUEviction
from tokenyard_plugins.eviction_slru import SLRUEviction


def rest(free: EvictionRule) -> list[int]:
    return free.pop(len(free))


def filled(free: EvictionRule, num_blocks: int) -> None:
    """Block 1 was written first, and freed first."""
    for block in free.pop(num_blocks):
        free.on_written([block])
        free.append([block])


def hit(free: EvictionRule, *blocks: int) -> None:
    for block in blocks:
        free.remove(block)
        free.on_hit([block])
        free.append([block])


def test_every_rule_evicts_what_its_model_does() -> None:
    machine = PlainRuleMachine
    machine.seen.clear()
    run_state_machine_as_test(
        machine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
    )
    assert machine.seen["hits"] > 80
    assert machine.seen["evicted"] > 100


def test_every_rule_within_retention_levels_evicts_what_its_model_does() -> None:
    machine = RetentionMachine
    machine.seen.clear()
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
    )
    assert machine.seen["evicted"] > 100
    assert machine.seen["full of high"] > 60


def test_fifo_goes_by_when_a_block_was_written_however_often_it_was_hit() -> None:
    free = FIFOEviction(4)
    filled(free, 4)
    hit(free, 1, 1, 1, 3)
    assert rest(free) == [1, 2, 3, 4]


def test_fifo_takes_the_end_before_the_start_of_what_was_written_at_once() -> None:
    free = FIFOEviction(3)
    free.on_written(free.pop(3))
    free.append([1, 2, 3])
    assert rest(free) == [3, 2, 1]


@pytest.mark.parametrize("name", ["fifo", "lfu"])
def test_what_is_hit_over_and_over_does_not_make_a_rule_grow(name: str) -> None:
    free = RULES[name][0](2)
    filled(free, 2)
    hit(free, *[1] * 1000)
    assert len(free._heap) < 100  # type: ignore[attr-defined]
    assert rest(free) == ([1, 2] if name == "fifo" else [2, 1])


def test_lfu_keeps_what_was_hit_often_and_of_equals_what_was_used_lately() -> None:
    free = LFUEviction(4, ageing=False)
    filled(free, 4)
    hit(free, 2, 2, 3, 1)
    assert rest(free) == [4, 3, 1, 2]


@pytest.mark.parametrize("ageing", [True, False])
def test_lfu_with_ageing_lets_old_fame_fade(ageing: bool) -> None:
    free = LFUEviction(2, ageing=ageing)
    filled(free, 2)
    hit(free, 1, 1, 1)
    for _ in range(5):  # block 1 is hit no more, and what comes is hit twice
        (block,) = free.pop(1)
        free.on_written([block])
        free.append([block])
        if block == 1:
            break
        hit(free, block, block)
    assert (block == 1) is ageing


def test_the_age_of_lfu_never_falls() -> None:
    free = LFUEviction(3, ageing=True)
    blocks = free.pop(3)
    free.on_written(blocks)
    for _ in range(3):
        free.on_hit([2])
    free.on_hit([3])
    free.append([2])
    assert free.pop(1) == [2]  # the age is 3 now
    free.append([1])
    assert free.pop(1) == [1]  # it was held meanwhile, and has rank 0
    free.on_written([1])
    free.append([1, 3])
    assert rest(free) == [3, 1]


def test_slru_takes_what_was_never_hit_however_recent_it_is() -> None:
    free = SLRUEviction(4, protected_share=0.5)
    filled(free, 4)
    hit(free, 1, 2)
    assert rest(free) == [3, 4, 1, 2]


def test_slru_protects_no_more_than_its_share_and_the_others_start_over() -> None:
    free = SLRUEviction(4, protected_share=0.5)
    filled(free, 4)
    hit(free, 1, 2, 3)
    assert rest(free) == [4, 1, 2, 3]


def test_slru_protects_no_content_for_what_its_block_held_before() -> None:
    free = SLRUEviction(2, protected_share=0.5)
    filled(free, 2)
    hit(free, 1)
    free.pop(2)
    free.on_written([1, 2])
    free.append([1, 2])
    assert rest(free) == [1, 2]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_that_cannot_be_is_refused_at_launch(share: float) -> None:
    allowed = rf"kv_cache\.eviction\.protected_share={share} is not valid: it must be a share of the blocks, above 0"
    with pytest.raises(ConfigError, match=allowed):
        EngineHarness([f"kv_cache.eviction={{name: slru, protected_share: {share}}}"])


@pytest.mark.parametrize(
    ("eviction", "kind"),
    [
        ("fifo", FIFOEviction),
        ("lfu", LFUEviction),
        ("{name: lfu, ageing: false}", LFUEviction),
        ("slru", SLRUEviction),
        ("{name: slru, protected_share: 0.25}", SLRUEviction),
    ],
)
def test_a_rule_that_is_chosen_decides_in_the_engine(eviction: str, kind: type[EvictionRule]) -> None:
    engine = EngineHarness([f"kv_cache.eviction={eviction}", "kv_cache.num_blocks=6", "kv_cache.block_size=4"])
    for number in range(4):
        engine.add([number] * 9, max_tokens=2)
        engine.run()
    assert isinstance(engine.kv_cache_manager.pool._free, kind)  # type: ignore[attr-defined]


def test_rules_are_made_for_the_blocks_of_the_pool() -> None:
    from tokenyard_plugins.eviction_lru import tokenyard_components

    (descriptor,) = tokenyard_components()
    free = descriptor.factory(NO_OPTIONS, EvictionContext(num_blocks=3))
    assert rest(free) == [1, 2, 3]
