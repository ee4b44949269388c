"""`kv_cache=paged` gives its manager everything that the context says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kv_requests import FakeRequest, start, table
from tokenyard.config import NO_OPTIONS, KVCacheConfig
from tokenyard.interfaces import EvictionRule
from tokenyard.interfaces.kv_cache import KVCacheManager, KVCacheManagerContext
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard_plugins.eviction_fifo import FIFOEviction
from tokenyard_plugins.paged import tokenyard_kv_cache_managers


def make(
    config: KVCacheConfig,
    *,
    group_windows: tuple[int | None, ...] = (None,),
    records_events: bool = False,
    make_eviction: Callable[[int], EvictionRule] | None = None,
) -> PagedKVCacheManager:
    (descriptor,) = tokenyard_kv_cache_managers()
    context = KVCacheManagerContext(
        config=config,
        num_blocks=6,
        group_windows=group_windows,
        records_events=records_events,
        make_eviction=make_eviction,
    )
    manager: KVCacheManager = descriptor.factory(NO_OPTIONS, context)
    assert isinstance(manager, PagedKVCacheManager)
    return manager


def test_size_windows_and_events_arrive() -> None:
    manager = make(KVCacheConfig(block_size=4), group_windows=(4, None), records_events=True)
    request = FakeRequest("a", list(range(8)))
    start(manager, request)
    assert (table(manager, request, 0), table(manager, request, 1)) == ([0, 2], [3, 4])
    assert len(manager.take_events()) == 4
    assert manager.usage.num_total_blocks == 6


def test_caching_can_be_off() -> None:
    manager = make(KVCacheConfig(block_size=4, enable_prefix_caching=False))
    start(manager, FakeRequest("a", list(range(8))))
    assert manager.inspect().cached_hashes == frozenset()


@pytest.mark.parametrize("rule", [None, FIFOEviction])
def test_the_eviction_rule_arrives(rule: Callable[[int], EvictionRule] | None) -> None:
    manager = make(KVCacheConfig(block_size=4), make_eviction=rule)
    old, new = FakeRequest("a", [1] * 4), FakeRequest("b", [2] * 4)
    start(manager, old)
    start(manager, new)
    manager.free(new)
    manager.free(old)
    start(manager, FakeRequest("c", [3] * 17))
    assert manager.lookup(FakeRequest("d", [1] * 5)).tokens == (4 if rule is None else 0)
