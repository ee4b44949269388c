"""K/V cache bookkeeping in the engine process: which request holds which block. Imports no torch.

Names are loaded when they are first used: a plugin with an eviction rule is imported at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.lazy_names import load_name

if TYPE_CHECKING:
    from tokenyard.kv_cache.block_pool import BlockPool
    from tokenyard.kv_cache.eviction import EmptyFirst, LRUEviction, RankedEviction, eviction_maker
    from tokenyard.kv_cache.paged import PagedKVCacheManager
    from tokenyard.kv_cache.radix import RadixKVCacheManager

_HOME = {
    "BlockPool": "tokenyard.kv_cache.block_pool",
    "EmptyFirst": "tokenyard.kv_cache.eviction",
    "LRUEviction": "tokenyard.kv_cache.eviction",
    "PagedKVCacheManager": "tokenyard.kv_cache.paged",
    "RadixKVCacheManager": "tokenyard.kv_cache.radix",
    "RankedEviction": "tokenyard.kv_cache.eviction",
    "eviction_maker": "tokenyard.kv_cache.eviction",
}

__all__ = [
    "BlockPool",
    "EmptyFirst",
    "LRUEviction",
    "PagedKVCacheManager",
    "RadixKVCacheManager",
    "RankedEviction",
    "eviction_maker",
]


def __getattr__(name: str) -> object:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
