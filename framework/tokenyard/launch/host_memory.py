"""Host memory for K/V that is swapped out: how many blocks, and which parts can use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.descriptors import ExecutorDescriptor, KVCacheManagerDescriptor, SchedulerDescriptor
from tokenyard.errors import CapacityError, ConfigError
from tokenyard.launch.chosen import chosen
from tokenyard.memory_size import parse_bytes

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig

_SINCE = (1, 6)  # the plugin API that can swap


def host_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    """Blocks that `kv_cache.host_memory` holds, at the size that they have on the device; 0 without it."""
    amount = config.kv_cache.host_memory
    if amount is None:
        return 0
    count = parse_bytes(amount, "kv_cache.host_memory") // bytes_per_block
    if count == 0:
        raise CapacityError(
            f"kv_cache.host_memory={amount} is less than one block of {config.kv_cache.block_size} tokens, which takes "
            f"{bytes_per_block} bytes; raise it, or leave it out"
        )
    return count


def check_host_memory(config: EngineConfig, catalogue: Catalogue) -> None:
    """Raise ConfigError for host memory that nobody would use, and for swapping without any."""
    if config.kv_cache.host_memory is None:
        if config.scheduler.preempt_mode == "swap":
            raise ConfigError(
                "scheduler.preempt_mode=swap needs kv_cache.host_memory to swap to, such as kv_cache.host_memory=4GiB"
            )
        return
    parts = (
        chosen(catalogue, "scheduler", config.scheduler.name, SchedulerDescriptor),
        chosen(catalogue, "kv_cache", config.kv_cache.name, KVCacheManagerDescriptor),
        chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor),
    )
    # One that was written before there was host memory would not copy what it is told to.
    for kind, part in zip(("scheduler", "kv_cache", "executor"), parts, strict=True):
        if part.api_version < _SINCE:
            since, own = (".".join(map(str, version)) for version in (_SINCE, part.api_version))
            raise ConfigError(
                f"kv_cache.host_memory={config.kv_cache.host_memory} needs parts for plugin API {since}; {kind} "
                f"'{part.name}' was written for {own}; leave out kv_cache.host_memory, or choose another"
            )
