"""How many blocks the K/V cache gets, and how long a request may be."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.errors import CapacityError, ConfigError
from tokenyard.launch.host_memory import host_blocks

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.executor import WorkerReport
    from tokenyard.model.files import ModelFiles

logger = logging.getLogger(__name__)

FIT_TO_MEMORY = -1  # the value of model.max_model_len that vLLM's users know for it
_SHORTEST = 2  # tokens: one of prompt, one of output


class CacheSize(NamedTuple):
    """What `size_kv_cache` decided."""

    num_blocks: int  # usable ones
    max_model_len: int
    num_host_blocks: int = 0  # in host memory, for K/V that is swapped out


def check_max_model_len(config: EngineConfig, files: ModelFiles) -> None:
    """Raise ConfigError when more is asked for than the model can do."""
    wanted = config.model.max_model_len
    if wanted is not None and wanted > files.max_model_len:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the {files.max_model_len} tokens that {config.model.name} was "
            "made for; lower it or leave it out"
        )


def size_kv_cache(config: EngineConfig, report: WorkerReport, model_limit: int) -> CacheSize:
    """Usable blocks and the greatest length; raises CapacityError when memory cannot hold one longest request.

    A request needs blocks for all its tokens in every KV group, those with a sliding window too: a prompt is allocated
    whole, and gives blocks back only once it is computed.
    """
    size, num_groups = config.kv_cache.block_size, len(report.kv_cache_groups)
    num_blocks = _num_blocks(config, report)
    max_model_len = _max_model_len(config, report, model_limit, num_blocks)
    needed = num_groups * -(-max_model_len // size)
    if config.kv_cache.num_blocks is None:
        if num_blocks < needed:
            raise CapacityError(
                f"{_room(config, report, num_blocks)}, but one request of model.max_model_len={max_model_len} tokens "
                f"needs {needed}; raise kv_cache.memory, lower model.max_model_len, or set it to -1 to take what fits"
            )
        # More than every request that may run at once can use would be waste.
        num_blocks = min(num_blocks, needed * config.scheduler.max_num_seqs)
    elif num_blocks < needed:
        _warn_of_small_pool(num_blocks, num_blocks // num_groups * size, max_model_len)
    return CacheSize(num_blocks, max_model_len, host_blocks(config, bytes_per_block(config, report)))


def _max_model_len(config: EngineConfig, report: WorkerReport, model_limit: int, num_blocks: int) -> int:
    """Prompt and output tokens of one request."""
    wanted = config.model.max_model_len
    if wanted != FIT_TO_MEMORY:
        return model_limit if wanted is None else wanted
    num_groups = len(report.kv_cache_groups)
    fitted = min(model_limit, num_blocks // num_groups * config.kv_cache.block_size)
    if fitted < _SHORTEST:
        raise CapacityError(
            f"model.max_model_len=-1 finds no length that fits: {_room(config, report, num_blocks)}, and a request of "
            f"{_SHORTEST} tokens needs {num_groups * -(-_SHORTEST // config.kv_cache.block_size)}; raise "
            "kv_cache.num_blocks or kv_cache.memory"
        )
    return fitted


def _warn_of_small_pool(num_blocks: int, capacity: int, max_model_len: int) -> None:
    logger.warning(
        "kv_cache.num_blocks=%d holds %d tokens, below model.max_model_len=%d: longer prompts are refused and longer "
        "answers end there",
        num_blocks,
        capacity,
        max_model_len,
    )


def _num_blocks(config: EngineConfig, report: WorkerReport) -> int:
    """Usable blocks: the configured number, or what the memory holds."""
    if config.kv_cache.num_blocks is None:
        return max(0, report.available_bytes // bytes_per_block(config, report) - 1)  # block 0 is never used
    if config.kv_cache.memory is not None:
        logger.warning("kv_cache.memory=%s is not used: kv_cache.num_blocks is set", config.kv_cache.memory)
    return config.kv_cache.num_blocks


def bytes_per_block(config: EngineConfig, report: WorkerReport) -> int:
    """Any group may get any block, so the largest group says what a block costs."""
    return config.kv_cache.block_size * max(group.bytes_per_token for group in report.kv_cache_groups)


def _room(config: EngineConfig, report: WorkerReport, num_blocks: int) -> str:
    room = f"the K/V cache has room for {num_blocks} blocks of {config.kv_cache.block_size} tokens"
    if config.kv_cache.num_blocks is not None:
        return room
    return f"{room} ({report.available_bytes / 2**20:.2f} MiB at {bytes_per_block(config, report)} bytes each)"
