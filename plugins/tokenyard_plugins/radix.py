"""`kv_cache=radix`: block tables with a prefix tree (RadixAttention; Zheng et al., SGLang, 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import KVCacheManagerDescriptor, hookimpl
from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import KVCacheManager, KVCacheManagerContext


def _make(options: NoOptions, context: KVCacheManagerContext) -> KVCacheManager:
    from tokenyard.kv_cache import RadixKVCacheManager  # only when chosen

    _check(context)
    return RadixKVCacheManager(
        num_blocks=context.num_blocks,
        block_size=context.config.block_size,
        enable_prefix_caching=context.config.enable_prefix_caching,
        retention_share=context.config.retention_share,
        records_events=context.records_events,
    )


def _check(context: KVCacheManagerContext) -> None:
    """Raise ConfigError for what the tree cannot do."""
    config = context.config
    if config.eviction != "lru":
        raise ConfigError(
            f"kv_cache.eviction='{config.eviction}' is not for kv_cache=radix, which evicts the leaf that was used "
            "longest ago: leave it out, or set kv_cache=paged"
        )
    if context.num_host_blocks or config.host_memory is not None:
        raise ConfigError(
            f"kv_cache.host_memory={config.host_memory} is not for kv_cache=radix, which has nothing in host memory: "
            "leave it out, or set kv_cache=paged"
        )
    if tuple(context.group_windows) != (None,):
        windows = ", ".join("all" if window is None else str(window) for window in context.group_windows)
        raise ConfigError(
            "kv_cache=radix is for models whose layers all attend to all tokens; this one has K/V groups that attend "
            f"to {windows}: set kv_cache=paged"
        )


@hookimpl
def tokenyard_kv_cache_managers() -> Iterator[KVCacheManagerDescriptor[NoOptions]]:
    yield KVCacheManagerDescriptor(
        name="radix",
        api_version=(1, 7),
        summary="reference-counted blocks, prefix cache as a tree, the least recently used leaf is evicted",
        factory=_make,
    )
