"""The scheduler of a config with its K/V manager and its policy: what decides, without a model to run it for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.descriptors import KVCacheManagerDescriptor, SchedulerDescriptor
from tokenyard.interfaces.kv_cache import KVCacheManager, KVCacheManagerContext
from tokenyard.interfaces.scheduler import Scheduler, SchedulerContext
from tokenyard.launch.chosen import chosen
from tokenyard.launch.eviction import eviction_rule_maker
from tokenyard.launch.timing import watched, watched_maker
from tokenyard.parts import make_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.executor import KVCacheGroupSpec
    from tokenyard.launch.assemble import Decorate
    from tokenyard.launch.cache_size import CacheSize
    from tokenyard.launch.steering import Steering
    from tokenyard.plugin_times import PluginTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """A scheduler and what it keeps the books with."""

    scheduler: Scheduler
    kv_cache_manager: KVCacheManager


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFacts:
    """What the start of an engine settled, and a scheduler is made with."""

    size: CacheSize
    vocab_size: int
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    records_kv_events: bool


def assemble_scheduler(
    config: EngineConfig,
    catalogue: Catalogue,
    facts: SchedulerFacts,
    *,
    steering: Steering,
    clock: Clock,
    decorate: Decorate,
    times: PluginTimes | None,
) -> SchedulerParts:
    """`decorate` and `times` are those of `assemble_parts`; raises PluginError."""
    manager = _manager(config, catalogue, facts, decorate, times)
    watched(times, manager, "kv_cache", config.kv_cache.name)
    context = SchedulerContext(
        config=config.scheduler,
        kv_cache_manager=manager,
        policy=None if steering.policy is None else decorate(steering.policy),
        clock=clock,
        max_model_len=facts.size.max_model_len,
        vocab_size=facts.vocab_size,
        block_size=config.kv_cache.block_size,
        prefix_caching=config.kv_cache.enable_prefix_caching,
        seed=config.seed,
        log_stats=config.engine.log_stats,
        latency=steering.latency,
        make_predictor=steering.make_predictor,
        shadow=steering.shadow,
        plugin_times=times,
    )
    scheduler = make_part(
        chosen(catalogue, "scheduler", config.scheduler.name, SchedulerDescriptor),
        Scheduler,
        lambda part: part.factory(config.scheduler.options, context),
    )
    return SchedulerParts(scheduler=decorate(scheduler), kv_cache_manager=manager)


def _manager(
    config: EngineConfig, catalogue: Catalogue, facts: SchedulerFacts, decorate: Decorate, times: PluginTimes | None
) -> KVCacheManager:
    make_eviction = eviction_rule_maker(config.kv_cache, catalogue)
    context = KVCacheManagerContext(
        config=config.kv_cache,
        num_blocks=facts.size.num_blocks,
        num_host_blocks=facts.size.num_host_blocks,
        group_windows=tuple(group.sliding_window for group in facts.kv_cache_groups),
        records_events=facts.records_kv_events,
        make_eviction=watched_maker(times, make_eviction, "eviction", config.kv_cache.eviction),
    )
    manager = make_part(
        chosen(catalogue, "kv_cache", config.kv_cache.name, KVCacheManagerDescriptor),
        KVCacheManager,
        lambda part: part.factory(config.kv_cache.options, context),
    )
    return decorate(manager)
