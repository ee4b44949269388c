"""`kv_cache=paged`: block tables with a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import KVCacheManagerDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import KVCacheManager, KVCacheManagerContext


def _make(options: NoOptions, context: KVCacheManagerContext) -> KVCacheManager:
    from tokenyard.kv_cache import PagedKVCacheManager  # only when chosen

    return PagedKVCacheManager(
        num_blocks=context.num_blocks,
        block_size=context.config.block_size,
        enable_prefix_caching=context.config.enable_prefix_caching,
    )


@hookimpl
def tokenyard_kv_cache_managers() -> Iterator[KVCacheManagerDescriptor[NoOptions]]:
    yield KVCacheManagerDescriptor(
        name="paged",
        api_version=(1, 1),
        summary="reference-counted blocks, prefix cache by chained sha256, least recently used goes first",
        factory=_make,
    )
