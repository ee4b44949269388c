"""Ranges of the core's own values, with the reason for each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError
from tokenyard.launch.cache_size import FIT_TO_MEMORY
from tokenyard.launch.convert import wrong
from tokenyard.launch.experiment_checks import check_experiment
from tokenyard.launch.schema import InvalidValueError
from tokenyard.launch.server_checks import check_server
from tokenyard.launch.workload_checks import check_workload
from tokenyard.memory_size import parse_bytes

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig, ExecutorConfig, KVCacheConfig, ModelConfig, SchedulerConfig

MAX_SEED = 2**63
MAX_SEQS, MAX_BATCHED_TOKENS = 2**16, 2**24  # arrays of these sizes are allocated at launch
MAX_LENGTH, MAX_BLOCKS = 2**24, 2**30  # block ids and positions are 32-bit numbers
MAX_RANKS = 64  # on one machine
MAX_THREADS = 1024  # OpenMP aborts the process where it cannot start them


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError on the first value that cannot work."""
    _check_model(config.model)
    _check_scheduler(config.scheduler)
    _check_lengths(config.scheduler, config.model.max_model_len)
    _check_kv_cache(config.kv_cache)
    _check_executor(config.executor, config.scheduler.max_num_seqs)
    _check_seed("seed", config.seed)
    _check_budget(config.plugins.budget_us)
    check_server(config.server)
    check_workload(config.workload)
    check_experiment(config.experiment)


def _at_least(key: str, value: int | None, minimum: int, unit: str, or_null: str = "") -> None:
    if value is not None and value < minimum:
        null = f", or null for {or_null}" if or_null else ""
        raise wrong(key, value, f"a whole number of {unit}, at least {minimum}{null}")


def _at_most(key: str, value: int | None, maximum: int, unit: str) -> None:
    if value is not None and value > maximum:
        raise wrong(key, value, f"a whole number of {unit}, at most {maximum}")


def _check_seed(key: str, value: int | None) -> None:
    if value is not None and not 0 <= value < MAX_SEED:
        raise wrong(key, value, "a whole number from 0 to 2**63 - 1")


def _check_model(model: ModelConfig) -> None:
    if not model.name.strip():
        raise wrong("model.name", model.name, "a model's name, a folder or a .gguf file")
    if model.max_model_len != FIT_TO_MEMORY:
        fitted = "the model's own limit (-1: what the memory holds)"
        _at_least("model.max_model_len", model.max_model_len, 2, "tokens", fitted)
        _at_most("model.max_model_len", model.max_model_len, MAX_LENGTH, "tokens")
    _check_seed("model.seed", model.seed)
    if not -1 <= model.max_logprobs <= MAX_LENGTH:
        allowed = f"a whole number from 0 to {MAX_LENGTH}, or -1 for no limit"
        raise wrong("model.max_logprobs", model.max_logprobs, allowed)


def _check_scheduler(scheduler: SchedulerConfig) -> None:
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    _at_least("scheduler.max_num_seqs", seqs, 1, "requests")
    _at_least("scheduler.max_num_batched_tokens", tokens, 1, "tokens")
    _at_most("scheduler.max_num_seqs", seqs, MAX_SEQS, "requests")
    _at_most("scheduler.max_num_batched_tokens", tokens, MAX_BATCHED_TOKENS, "tokens")
    threshold = scheduler.long_prefill_token_threshold
    _at_least("scheduler.long_prefill_token_threshold", threshold, 0, "tokens (0 = no limit)")
    if threshold and not scheduler.enable_chunked_prefill:
        raise InvalidValueError(
            "scheduler.long_prefill_token_threshold",
            f"scheduler.long_prefill_token_threshold={threshold} has no effect without chunked prefill; set "
            "scheduler.enable_chunked_prefill=true, or leave the threshold at 0",
        )
    if tokens < seqs:
        raise InvalidValueError(
            "scheduler.max_num_batched_tokens",
            f"scheduler.max_num_batched_tokens ({tokens}) is below scheduler.max_num_seqs ({seqs}): each running "
            "request needs one token of a step; raise the first or lower the second",
        )


def _check_lengths(scheduler: SchedulerConfig, max_model_len: int | None) -> None:
    if max_model_len is None or max_model_len == FIT_TO_MEMORY:
        return  # known only when the model is loaded
    tokens, threshold = scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold
    if not scheduler.enable_chunked_prefill and tokens < max_model_len:
        raise InvalidValueError(
            "scheduler.max_num_batched_tokens",
            f"scheduler.max_num_batched_tokens ({tokens}) is below model.max_model_len ({max_model_len}): without "
            "chunked prefill a whole prompt must fit one step; raise the first, lower the second or set "
            "scheduler.enable_chunked_prefill=true",
        )
    if threshold > max_model_len:
        raise InvalidValueError(
            "scheduler.long_prefill_token_threshold",
            f"scheduler.long_prefill_token_threshold ({threshold}) is above model.max_model_len ({max_model_len}): no "
            "prompt is that long; lower it, or use 0 for no limit",
        )


def _check_kv_cache(kv_cache: KVCacheConfig) -> None:
    _at_least("kv_cache.block_size", kv_cache.block_size, 1, "tokens")
    _at_least("kv_cache.num_blocks", kv_cache.num_blocks, 1, "blocks", "as many as the memory holds")
    _at_most("kv_cache.block_size", kv_cache.block_size, MAX_LENGTH, "tokens")
    _at_most("kv_cache.num_blocks", kv_cache.num_blocks, MAX_BLOCKS, "blocks")
    if kv_cache.memory is not None:
        parse_bytes(kv_cache.memory)
    if kv_cache.host_memory is not None:
        parse_bytes(kv_cache.host_memory, "kv_cache.host_memory")
    share = kv_cache.gpu_memory_utilization
    if not 0 < share <= 1:  # also refuses NaN
        raise wrong("kv_cache.gpu_memory_utilization", share, "a share of the GPU's memory, above 0 and up to 1")
    if not 0 <= kv_cache.retention_share <= 1:
        raise wrong("kv_cache.retention_share", kv_cache.retention_share, "a share of the blocks, from 0 to 1")


def _check_executor(executor: ExecutorConfig, max_num_seqs: int) -> None:
    _at_least("executor.num_threads", executor.num_threads, 1, "threads", "the physical cores")
    _at_most("executor.num_threads", executor.num_threads, MAX_THREADS, "threads")
    _check_ranks(executor)
    sizes = executor.cudagraph_capture_sizes
    if sizes is None:
        return
    if executor.enforce_eager:
        raise InvalidValueError(
            "executor.cudagraph_capture_sizes",
            "executor.cudagraph_capture_sizes has no effect with executor.enforce_eager=true; leave out one of them",
        )
    if not sizes or not all(1 <= size <= max_num_seqs for size in sizes):
        allowed = f"numbers of requests from 1 to scheduler.max_num_seqs ({max_num_seqs}), at least one"
        raise wrong("executor.cudagraph_capture_sizes", list(sizes), allowed)


def _check_ranks(executor: ExecutorConfig) -> None:
    size = executor.tensor_parallel_size
    _at_least("executor.tensor_parallel_size", size, 1, "ranks")
    _at_most("executor.tensor_parallel_size", size, MAX_RANKS, "ranks")
    if size > 1 and executor.name == "inproc":
        raise InvalidValueError(
            "executor.tensor_parallel_size",
            f"executor.tensor_parallel_size={size} needs a process for each rank, and executor=inproc has one worker; "
            "set executor=multiproc",
        )


def _check_budget(budget_us: float | None) -> None:
    if budget_us is not None and not 0 < budget_us < math.inf:  # also refuses NaN
        raise wrong("plugins.budget_us", budget_us, "microseconds of a step, a number above 0, or null for no budget")


def refuse_targets(value: object, key: str) -> None:
    """Raise when `_target_` stands anywhere: a config names components, it never names code to call."""
    if isinstance(value, dict):
        for name, item in value.items():
            where = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                raise ConfigError(
                    f"'{where}' is refused: a config never names code to call; write a plugin and choose it by its name"
                )
            refuse_targets(item, where)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            refuse_targets(item, f"{key}[{index}]")
