"""`kv_cache=paged`: block tables with a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import KVCacheManagerDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import KVCacheManager, KVCacheManagerContext


def _make(options: NoOptions, context: KVCacheManagerContext) -> KVCacheManager:
    from tokenyard.kv_cache import PagedKVCacheManager, eviction_maker  # only when chosen

    return PagedKVCacheManager(
        num_blocks=context.num_blocks,
        block_size=context.config.block_size,
        enable_prefix_caching=context.config.enable_prefix_caching,
        group_windows=context.group_windows,
        make_eviction=eviction_maker(context),
        retention_share=context.config.retention_share,
        records_events=context.records_events,
        num_host_blocks=context.num_host_blocks,
    )


@hookimpl
def tokenyard_kv_cache_managers() -> Iterator[KVCacheManagerDescriptor[NoOptions]]:
    yield KVCacheManagerDescriptor(
        name="paged",
        api_version=(1, 7),
        summary="reference-counted blocks per KV group, prefix cache by chained sha256, any eviction rule",
        factory=_make,
    )
