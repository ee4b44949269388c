"""EngineConfig and plugins -> an engine that runs in virtual time, without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenyard.descriptors import EngineCoreDescriptor, ExecutorDescriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces.executor import Executor, ExecutorContext, KVCachePlan
from tokenyard.launch.assemble import EngineParts, assemble_parts
from tokenyard.launch.cache_size import size_kv_cache
from tokenyard.launch.chosen import chosen
from tokenyard.launch.host_memory import check_host_memory
from tokenyard.launch.schema import NO_LATENCY
from tokenyard.launch.steering import make_steering
from tokenyard.launch.tracing import check_trace
from tokenyard.parts import make_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.observer import Observer

MOST_TOKENS = 2**20  # of the K/V cache, where none is named: more than any batch of today needs
LONGEST = 2**18  # tokens of a request, where no limit is named
_TABLE_TOKENS = 2**28  # that a scheduler's table may have room for: a row for each of twice max_num_seqs requests


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEngine:
    """An engine, and the sizes that it was given."""

    parts: EngineParts
    config: EngineConfig  # with `kv_cache.num_blocks` and `model.max_model_len` as they are
    capacity_tokens: int  # prompt and output tokens that one request may have at most


def build_simulated(
    config: EngineConfig, catalogue: Catalogue, *, clock: Clock, observers: Sequence[Observer] = ()
) -> SimulatedEngine:
    """Raises ConfigError and PluginError."""
    descriptor = chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor)
    if not descriptor.is_simulated:
        raise ConfigError(f"executor={config.executor.name} runs a model; a simulation needs executor=simulated")
    if config.latency.name == NO_LATENCY:
        raise ConfigError(
            "latency=none: nobody says how long a step takes; choose a latency model, such as latency=linear "
            "latency.per_step=0.005 latency.per_token=1e-5"
        )
    check_host_memory(config, catalogue)
    check_trace(config.trace)
    config = with_sizes(config)
    steering = make_steering(config, catalogue)
    context = ExecutorContext(
        steps_in_flight=chosen(catalogue, "engine", config.engine.name, EngineCoreDescriptor).steps_in_flight,
        clock=clock,
        latency=steering.latency,
    )
    executor = make_part(descriptor, Executor, lambda part: part.factory(config.executor.options, context))
    report = executor.initialize(config)
    size = size_kv_cache(config, report, config.model.max_model_len or LONGEST)
    executor.allocate_kv_cache(KVCachePlan(num_blocks=size.num_blocks + 1, block_size=config.kv_cache.block_size))
    parts = assemble_parts(
        config,
        catalogue,
        executor=executor,
        report=report,
        steering=steering,
        clock=clock,
        size=size,
        observers=observers,
    )
    most = min(size.max_model_len, parts.kv_cache_manager.capacity_tokens() + 1)
    return SimulatedEngine(parts=parts, config=config, capacity_tokens=most)


def with_sizes(config: EngineConfig) -> EngineConfig:
    """The config with the sizes that a model would have given: so large that they are no limit to usual work."""
    if config.kv_cache.memory is not None:
        raise ConfigError(
            f"kv_cache.memory={config.kv_cache.memory}: a simulation has no model, so nobody knows what a block costs; "
            "give kv_cache.num_blocks"
        )
    scheduler, block_size = config.scheduler, config.kv_cache.block_size
    max_model_len, num_blocks = config.model.max_model_len, config.kv_cache.num_blocks
    if max_model_len is None or max_model_len < 0:
        max_model_len = min(LONGEST, max(1024, _TABLE_TOKENS // (2 * scheduler.max_num_seqs)))
        if not scheduler.enable_chunked_prefill:
            max_model_len = min(max_model_len, scheduler.max_num_batched_tokens)
        if num_blocks is not None:
            max_model_len = max(2, min(max_model_len, num_blocks * block_size))
    if num_blocks is None:
        longest = -(-max_model_len // block_size)
        num_blocks = max(longest, min(-(-MOST_TOKENS // block_size), longest * scheduler.max_num_seqs))
    return replace(
        config,
        model=replace(config.model, max_model_len=max_model_len),
        kv_cache=replace(config.kv_cache, num_blocks=num_blocks),
    )
