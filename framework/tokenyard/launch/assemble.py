"""EngineConfig and plugins -> a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tokenyard.clock import Clock, MonotonicClock
from tokenyard.descriptors import (
    Descriptor,
    EngineCoreDescriptor,
    ExecutorDescriptor,
    KVCacheManagerDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)
from tokenyard.errors import CapacityError, ConfigError, PluginError
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext
from tokenyard.interfaces.executor import Executor, ExecutorContext, KVCachePlan, WorkerReport
from tokenyard.interfaces.kv_cache import KVCacheManager, KVCacheManagerContext
from tokenyard.interfaces.observer import Observer, ObserverContext
from tokenyard.interfaces.policy import PolicyContext, SchedulingPolicy
from tokenyard.interfaces.scheduler import Scheduler, SchedulerContext
from tokenyard.model.files import resolve_model
from tokenyard.parts import make_part
from tokenyard.platform import Platform

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, ObserverConfig
    from tokenyard.model.files import ModelFiles

logger = logging.getLogger(__name__)

DescriptorT = TypeVar("DescriptorT", bound=Descriptor[object])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine with what its front end needs to know."""

    core: EngineCore
    clock: Clock
    files: ModelFiles
    report: WorkerReport
    max_model_len: int
    num_blocks: int


def build_engine(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    clock: Clock | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> RunningEngine:
    """Start the executor, load the model and put the parts together; nothing is left running when it raises."""
    files = resolve_model(config.model.name, on_progress)
    max_model_len = _max_model_len(config, files)
    clock = clock or MonotonicClock()
    policy = _policy(config, catalogue)  # before the model is loaded: a mistake in it should not cost that time
    executor = make_part(
        chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor),
        Executor,
        lambda part: part.factory(config.executor.options, ExecutorContext(on_progress=on_progress)),
    )
    try:
        report = executor.initialize(config)
        num_blocks = _num_blocks(config, report, max_model_len)
        # Block 0 is never handed out, hence one more than can be used.
        executor.allocate_kv_cache(KVCachePlan(num_blocks=num_blocks + 1, block_size=config.kv_cache.block_size))
        scheduler = _scheduler(config, catalogue, report, policy, clock, max_model_len, num_blocks)
        core = _engine_core(config, catalogue, scheduler, executor, clock)
    except BaseException:
        executor.shutdown()
        raise
    return RunningEngine(
        core=core, clock=clock, files=files, report=report, max_model_len=max_model_len, num_blocks=num_blocks
    )


def chosen(catalogue: Catalogue, kind: str, name: str, expected: type[DescriptorT]) -> DescriptorT:
    """The descriptor that the config names; raises PluginError when it cannot run here."""
    entry = catalogue.get(kind, name)
    if not isinstance(entry.descriptor, expected):
        raise PluginError(f"'{name}' is registered as {kind} but described by {type(entry.descriptor).__name__}")
    if reasons := entry.unavailable_reasons(Platform()):
        raise PluginError(f"{kind} '{name}' cannot run here: {'; '.join(reasons)}")
    return entry.descriptor


def _max_model_len(config: EngineConfig, files: ModelFiles) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return files.max_model_len
    if wanted > files.max_model_len:
        raise ConfigError(
            f"model.max_model_len={wanted} is more than the {files.max_model_len} tokens that {config.model.name} was "
            "made for; lower it or leave it out"
        )
    return wanted


def _num_blocks(config: EngineConfig, report: WorkerReport, max_model_len: int) -> int:
    """Usable blocks; raises CapacityError when a pool derived from memory cannot hold one longest request."""
    size = config.kv_cache.block_size
    needed = -(-max_model_len // size)
    explicit = config.kv_cache.num_blocks
    if explicit is not None:
        if config.kv_cache.memory is not None:
            logger.warning("kv_cache.memory=%s is not used: kv_cache.num_blocks is set", config.kv_cache.memory)
        if explicit < needed:
            logger.warning(
                "kv_cache.num_blocks=%d holds %d tokens, below model.max_model_len=%d: longer prompts are "
                "refused and longer answers end there",
                explicit,
                explicit * size,
                max_model_len,
            )
        return explicit
    bytes_per_block = size * sum(group.bytes_per_token for group in report.kv_cache_groups)
    num_blocks = report.available_bytes // bytes_per_block - 1
    if num_blocks < needed:
        raise CapacityError(
            f"the K/V cache has room for {max(0, num_blocks)} blocks of {size} tokens "
            f"({report.available_bytes / 2**20:.0f} MiB at {bytes_per_block} bytes each), but one request of "
            f"model.max_model_len={max_model_len} tokens needs {needed}; raise kv_cache.memory or lower "
            "model.max_model_len"
        )
    # More than every request that may run at once can use would be waste.
    return min(num_blocks, needed * config.scheduler.max_num_seqs)


def _policy(config: EngineConfig, catalogue: Catalogue) -> SchedulingPolicy | None:
    policy = config.scheduler.policy
    if policy is None:
        return None
    context = PolicyContext(
        seed=config.seed,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
    )
    return make_part(
        chosen(catalogue, "policy", policy.name, PolicyDescriptor),
        SchedulingPolicy,
        lambda part: part.factory(policy.options, context),
    )


def _scheduler(
    config: EngineConfig,
    catalogue: Catalogue,
    report: WorkerReport,
    policy: SchedulingPolicy | None,
    clock: Clock,
    max_model_len: int,
    num_blocks: int,
) -> Scheduler:
    windows = tuple(group.sliding_window for group in report.kv_cache_groups)
    kv_context = KVCacheManagerContext(config=config.kv_cache, num_blocks=num_blocks, group_windows=windows)
    kv_cache_manager = make_part(
        chosen(catalogue, "kv_cache", config.kv_cache.name, KVCacheManagerDescriptor),
        KVCacheManager,
        lambda part: part.factory(config.kv_cache.options, kv_context),
    )
    context = SchedulerContext(
        config=config.scheduler,
        kv_cache_manager=kv_cache_manager,
        policy=policy,
        clock=clock,
        max_model_len=max_model_len,
        vocab_size=report.vocab_size,
        block_size=config.kv_cache.block_size,
        prefix_caching=config.kv_cache.enable_prefix_caching,
        seed=config.seed,
    )
    return make_part(
        chosen(catalogue, "scheduler", config.scheduler.name, SchedulerDescriptor),
        Scheduler,
        lambda part: part.factory(config.scheduler.options, context),
    )


def _engine_core(
    config: EngineConfig, catalogue: Catalogue, scheduler: Scheduler, executor: Executor, clock: Clock
) -> EngineCore:
    context = EngineCoreContext(
        scheduler=scheduler, executor=executor, clock=clock, observers=_observers(config, catalogue)
    )
    return make_part(
        chosen(catalogue, "engine", config.engine.name, EngineCoreDescriptor),
        EngineCore,
        lambda part: part.factory(config.engine.options, context),
    )


def _observers(config: EngineConfig, catalogue: Catalogue) -> list[Observer]:
    context = ObserverContext(seed=config.seed)
    return [_observer(row, catalogue, context) for row in config.observers]


def _observer(row: ObserverConfig, catalogue: Catalogue, context: ObserverContext) -> Observer:
    descriptor = chosen(catalogue, "observer", row.name, ObserverDescriptor)
    return make_part(descriptor, Observer, lambda part: part.factory(row.options, context))
