"""K/V cache bookkeeping in the engine process: which request holds which block. Imports no torch."""

from tokenyard.kv_cache.block_pool import BlockPool
from tokenyard.kv_cache.paged import PagedKVCacheManager

__all__ = ["BlockPool", "PagedKVCacheManager"]
