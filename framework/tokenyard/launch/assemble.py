"""EngineConfig and plugins -> a running engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from tokenyard.clock import Clock, MonotonicClock
from tokenyard.config import NoOptions
from tokenyard.descriptors import (
    EngineCoreDescriptor,
    ExecutorDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
)
from tokenyard.errors import PluginError, TokenyardError
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext
from tokenyard.interfaces.executor import Executor, ExecutorContext, KVCachePlan, WorkerReport
from tokenyard.interfaces.observer import Observer, ObserverContext
from tokenyard.launch.cache_size import CacheSize, check_max_model_len, size_kv_cache
from tokenyard.launch.chosen import chosen
from tokenyard.launch.host_memory import check_host_memory
from tokenyard.launch.scheduler_parts import SchedulerFacts, assemble_scheduler
from tokenyard.launch.steering import Steering, make_steering
from tokenyard.launch.timing import plugin_times_of, watched, watched_steering
from tokenyard.launch.tracing import Tracing, check_trace
from tokenyard.model.files import resolve_model
from tokenyard.parts import make_part
from tokenyard.platform import Platform
from tokenyard.worker.attention_choice import AUTO, check_attention

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, ObserverConfig
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.interfaces.policy import SchedulingPolicy
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.model.files import ModelFiles
    from tokenyard.model.hub import Token
    from tokenyard.plugin_times import PluginTimes

PartT = TypeVar("PartT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine loop and the parts it was made of."""

    core: EngineCore
    scheduler: Scheduler
    kv_cache_manager: KVCacheManager
    policy: SchedulingPolicy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a front end needs to know of an engine, wherever that runs."""

    files: ModelFiles
    report: WorkerReport
    max_model_len: int
    num_blocks: int
    metadata_type: type  # what the active policy may be told of a request: see PolicyDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine(EngineFacts):
    """An engine in this process."""

    core: EngineCore
    clock: Clock
    kv_cache_manager: KVCacheManager | None = None  # None where somebody else has put it together


class Decorate(Protocol):
    """Called with each part as it is made; what it returns is used instead, for measuring and tracing."""

    def __call__(self, part: PartT, /) -> PartT: ...


def as_it_is(part: PartT, /) -> PartT:
    """Decorates nothing."""
    return part


def build_engine(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    clock: Clock | None = None,
    on_progress: Callable[[str], None] | None = None,
    decorate: Decorate = as_it_is,
    hub_token: Token = None,
    plugin_times: PluginTimes | None = None,
    observers: Sequence[Observer] = (),
) -> RunningEngine:
    """Start the executor, load the model and put the parts together; nothing is left running when it raises.

    `observers` are told after the config's.

    `hub_token` is for fetching a Hub id. It is no part of the config, which is printed: whatever is fetched is in the
    local cache before a worker looks for it.
    """
    check_before_fetching(config, catalogue)
    files = resolve_model(config.model.name, on_progress, revision=config.model.revision, token=hub_token)
    config = at_commit(config, files)
    check_max_model_len(config, files)
    clock = clock or MonotonicClock()
    steering = make_steering(config, catalogue)  # before the model is loaded: a mistake should not cost that time
    steps_in_flight = chosen(catalogue, "engine", config.engine.name, EngineCoreDescriptor).steps_in_flight
    context = ExecutorContext(on_progress=on_progress, steps_in_flight=steps_in_flight)
    executor = make_part(
        chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor),
        Executor,
        lambda part: part.factory(config.executor.options, context),
    )
    try:
        report = _told(config, "initialize", lambda: executor.initialize(config))
        size = size_kv_cache(config, report, files.max_model_len)
        # Block 0 is never handed out, hence one more than can be used.
        plan = KVCachePlan(
            num_blocks=size.num_blocks + 1,
            block_size=config.kv_cache.block_size,
            max_model_len=size.max_model_len,
            num_host_blocks=size.num_host_blocks,
        )
        _told(config, "allocate_kv_cache", lambda: executor.allocate_kv_cache(plan))
        parts = assemble_parts(
            config,
            catalogue,
            executor=decorate(executor),
            report=report,
            steering=steering,
            clock=clock,
            size=size,
            decorate=decorate,
            plugin_times=plugin_times,
            observers=observers,
        )
    except BaseException:
        executor.shutdown()
        raise
    return RunningEngine(
        core=parts.core,
        clock=clock,
        kv_cache_manager=parts.kv_cache_manager,
        files=files,
        report=report,
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        metadata_type=metadata_type(config, catalogue),
    )


def check_before_fetching(config: EngineConfig, catalogue: Catalogue) -> None:
    """Raise ConfigError or PluginError for what cannot run here whatever the model: it might be fetched for nothing."""
    check_host_memory(config, catalogue)
    check_trace(config.trace)
    if config.attention.name != AUTO:
        check_attention(catalogue, config.attention.name, Platform())


def at_commit(config: EngineConfig, files: ModelFiles) -> EngineConfig:
    """With the commit for a revision: a branch may move before a worker asks for its files."""
    if files.commit is None:
        return config
    return replace(config, model=replace(config.model, revision=files.commit))


def _told(config: EngineConfig, method: str, call: Callable[[], PartT]) -> PartT:
    """Call an executor's method; what it raises unawares is told with its name."""
    try:
        return call()
    except TokenyardError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"executor '{config.executor.name}' failed in {method}: {type(error).__name__}: {error}"
        ) from error


def assemble_parts(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    executor: Executor,
    report: WorkerReport,
    steering: Steering,
    clock: Clock,
    size: CacheSize,
    decorate: Decorate = as_it_is,
    plugin_times: PluginTimes | None = None,
    observers: Sequence[Observer] = (),
) -> EngineParts:
    """Everything but the model: K/V cache manager, scheduler, observers and loop around a running executor.

    `plugin_times`: the timers of its plugins; None = as the config asks for. `observers` are told after the config's.
    """
    times = plugin_times or plugin_times_of(config, catalogue, clock)
    named = [_observer(row, catalogue, ObserverContext(seed=config.seed)) for row in config.observers]
    facts = SchedulerFacts(
        size=size,
        vocab_size=report.vocab_size,
        kv_cache_groups=report.kv_cache_groups,
        records_kv_events=any(observer.wants_kv_events for observer in (*named, *observers)),
    )
    with Tracing(config, catalogue, clock) as tracing:
        parts = assemble_scheduler(
            config,
            catalogue,
            facts,
            steering=watched_steering(times, steering, config),
            clock=tracing.clock,
            decorate=decorate,
            times=times,
        )
        scheduler, closers = tracing.wrap(parts, facts)
        watchers = [
            watched(times, decorate(observer), "observer", row.name)
            for observer, row in zip(named, config.observers, strict=True)
        ]
        context = EngineCoreContext(
            scheduler=scheduler,
            executor=executor,
            clock=clock,
            observers=[*watchers, *observers, *closers],
            log_stats=config.engine.log_stats,
            plugin_times=times,
        )
        core = _core(config, catalogue, context)
    return EngineParts(core=core, scheduler=scheduler, kv_cache_manager=parts.kv_cache_manager, policy=steering.policy)


def _core(config: EngineConfig, catalogue: Catalogue, context: EngineCoreContext) -> EngineCore:
    return make_part(
        chosen(catalogue, "engine", config.engine.name, EngineCoreDescriptor),
        EngineCore,
        lambda part: part.factory(config.engine.options, context),
    )


def metadata_type(config: EngineConfig, catalogue: Catalogue) -> type:
    """What users may tell the policy that the config names; NoOptions where there is none."""
    policy = config.scheduler.policy
    if policy is None:
        return NoOptions
    return chosen(catalogue, "policy", policy.name, PolicyDescriptor).metadata_type


def _observer(row: ObserverConfig, catalogue: Catalogue, context: ObserverContext) -> Observer:
    descriptor = chosen(catalogue, "observer", row.name, ObserverDescriptor)
    return make_part(descriptor, Observer, lambda part: part.factory(row.options, context))
