"""K/V cache bookkeeping in the engine process: which request holds which block. Imports no torch.

Names are loaded when they are first used: a plugin with an eviction rule is imported at every start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    if name not in _HOME:
        raise AttributeError(f"module 'tokenyard.kv_cache' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
