"""How long content is kept that a request says is worth more, or less."""

from __future__ import annotations

import pytest
from eviction_models import RULES
from kv_requests import FakeRequest, decode, start
from tokenyard.errors import ConfigError, ValidationError
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.request import Retention
from tokenyard.testing import EngineHarness

each_rule = pytest.mark.parametrize("rule", sorted(RULES))


def paged(num_blocks: int, *, rule: str = "lru", share: float = 0.5) -> PagedKVCacheManager:
    return PagedKVCacheManager(num_blocks=num_blocks, block_size=4, make_eviction=RULES[rule][0], retention_share=share)


def ended(manager: PagedKVCacheManager, token: int, retention: Retention = "normal", num_tokens: int = 4) -> None:
    request = FakeRequest(f"{token}", [token] * num_tokens, retention=retention)
    start(manager, request)
    manager.free(request)


def kept(manager: PagedKVCacheManager, *tokens: int) -> list[int]:
    return [token for token in tokens if manager.lookup(FakeRequest("?", [token] * 5)).tokens]


def evict(manager: PagedKVCacheManager, count: int) -> None:
    """By a request that writes nothing full and stays."""
    for _ in range(count):
        manager.allocate(FakeRequest(f"x{manager.usage.num_free_blocks}", [99]), 1)


@each_rule
def test_low_goes_before_normal_and_normal_before_high_under_every_rule(rule: str) -> None:
    manager = paged(6, rule=rule)
    for token, retention in ((1, "high"), (2, "normal"), (3, "low"), (4, "normal"), (5, "low"), (6, "high")):
        ended(manager, token, retention)  # type: ignore[arg-type]
    seen = []
    for _ in range(6):
        evict(manager, 1)
        seen.append(kept(manager, 1, 2, 3, 4, 5, 6))
    assert seen == [[1, 2, 4, 5, 6], [1, 2, 4, 6], [1, 4, 6], [1, 6], [6], []]


@each_rule
def test_blocks_without_content_go_before_low_ones(rule: str) -> None:
    manager = paged(4, rule=rule)
    ended(manager, 1, "low", num_tokens=6)  # its second block is not full
    evict(manager, 3)
    assert kept(manager, 1) == [1]


def test_the_highest_level_of_those_who_used_it_counts() -> None:
    manager = paged(6, share=1)
    for token, levels in ((1, ("low", "high")), (2, ("high", "low")), (3, ("low",)), (4, ("low", "normal"))):
        for level in levels:
            ended(manager, token, level, num_tokens=5)  # type: ignore[arg-type]
    ended(manager, 5)
    seen = []
    for _ in range(4):
        evict(manager, 1)
        seen.append(kept(manager, 1, 2, 3, 4, 5))
    assert seen == [[1, 2, 3, 4, 5], [1, 2, 4, 5], [1, 2, 5], [1, 2]]


def test_nobody_pays_for_levels_until_somebody_uses_one() -> None:
    manager = paged(4)
    ended(manager, 1)
    assert manager.pool._levels is None
    ended(manager, 2, "low")
    assert manager.pool._levels is not None
    assert kept(manager, 1, 2) == [1, 2]


def test_what_was_there_before_anybody_used_a_level_is_normal() -> None:
    manager = paged(4)
    ended(manager, 1)
    held = FakeRequest("held", [2] * 4)
    start(manager, held)
    ended(manager, 3, "low")
    ended(manager, 4, "high")
    manager.free(held)
    evict(manager, 2)
    assert kept(manager, 1, 2, 3, 4) == [2, 4]
    manager.check_invariants()


# The share of `high`


def test_high_has_no_more_than_its_share_and_the_newest_displace_the_oldest() -> None:
    manager = paged(6, share=0.5)
    for token in (1, 2, 3, 4):
        ended(manager, token, "high")
    ended(manager, 5)
    ended(manager, 6)
    evict(manager, 3)
    assert kept(manager, 1, 2, 3, 4, 5, 6) == [2, 3, 4]


@each_rule
def test_of_a_prefix_that_is_displaced_the_end_goes_before_the_beginning(rule: str) -> None:
    manager = paged(5, rule=rule, share=0.4)
    ended(manager, 1, "high", num_tokens=8)
    ended(manager, 2, "high", num_tokens=8)
    evict(manager, 2)
    assert manager.lookup(FakeRequest("?", [1] * 9)).tokens == 4


def test_one_tenant_cannot_pin_the_cache_by_holding_it() -> None:
    manager = paged(6, share=0.5)
    start(manager, FakeRequest("greedy", [1] * 12, retention="high"))
    late = FakeRequest("late", [2] * 4, retention="high")
    start(manager, late)  # counts as normal: the share is held
    manager.free(late)
    ended(manager, 3)
    ended(manager, 4)
    evict(manager, 1)
    assert kept(manager, 2, 3, 4) == [3, 4]


def test_of_a_prefix_that_is_too_long_for_the_share_the_beginning_is_high() -> None:
    manager = paged(6, share=0.5)
    ended(manager, 1, "high", num_tokens=20)
    ended(manager, 2)
    evict(manager, 3)
    assert manager.lookup(FakeRequest("?", [1] * 21)).tokens == 12


def test_what_comes_after_blocks_that_found_no_room_is_not_high_either() -> None:
    manager = paged(8, share=0.25)
    greedy = FakeRequest("greedy", [1] * 8, retention="high")
    start(manager, greedy)
    request = FakeRequest("a", [2] * 4, retention="high")
    start(manager, request)
    manager.free(greedy)  # there is room from now on
    decode(manager, request, 2, 2, 2, 2)
    levels = manager.pool._levels
    assert levels is not None
    assert levels.num_high == 2  # the blocks of `greedy`


@pytest.mark.parametrize(("share", "expected"), [(0.0, [4, 5, 6]), (1.0, [1, 2, 3])])
def test_the_share_may_be_nothing_or_all(share: float, expected: list[int]) -> None:
    manager = paged(6, share=share)
    for token in (1, 2, 3):
        ended(manager, token, "high")
    for token in (4, 5, 6):
        ended(manager, token)
    evict(manager, 3)
    assert kept(manager, 1, 2, 3, 4, 5, 6) == expected


def test_reset_forgets_levels_too() -> None:
    manager = paged(4, share=0.5)
    ended(manager, 1, "high", num_tokens=8)
    assert manager.reset()
    ended(manager, 2, "high", num_tokens=8)
    ended(manager, 3)
    evict(manager, 2)
    assert manager.lookup(FakeRequest("?", [2] * 9)).tokens == 8


# Through the engine


@pytest.mark.parametrize("kv_cache", ["paged", "radix"])
@pytest.mark.parametrize("retention", ["low", "normal", "high"])
def test_a_hint_keeps_a_prefix_through_a_crowd(kv_cache: str, retention: Retention) -> None:
    engine = EngineHarness([f"kv_cache={kv_cache}", "kv_cache.block_size=4", "kv_cache.num_blocks=12"])
    engine.add([7] * 9, max_tokens=1, retention=retention)
    engine.run()
    for number in range(10, 15):
        engine.add([number] * 12, max_tokens=1)
        engine.run()
    again = engine.add([7] * 9, max_tokens=1)
    engine.run()
    assert engine.requests[again].num_cached == (8 if retention == "high" else 0)


def test_a_level_that_is_none_ends_the_request_and_not_the_engine() -> None:
    engine = EngineHarness(["kv_cache.num_blocks=12"])
    with pytest.raises(ValidationError, match="retention='most' is not valid: it must be one of low, normal, high"):
        engine.add([1, 2, 3], retention="most")  # type: ignore[arg-type]
    engine.add([1, 2, 3], max_tokens=1)
    engine.run()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_cannot_be_is_refused_at_launch(share: float) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.retention_share must be a share of the blocks, from 0 to 1"):
        EngineHarness([f"kv_cache.retention_share={share}"])
