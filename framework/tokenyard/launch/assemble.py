"""EngineConfig and plugins -> a running engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from tokenyard.clock import Clock, MonotonicClock
from tokenyard.config import NoOptions
from tokenyard.descriptors import (
    Descriptor,
    EngineCoreDescriptor,
    ExecutorDescriptor,
    KVCacheManagerDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)
from tokenyard.errors import PluginError, TokenyardError
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext
from tokenyard.interfaces.executor import Executor, ExecutorContext, KVCachePlan, WorkerReport
from tokenyard.interfaces.kv_cache import KVCacheManager, KVCacheManagerContext
from tokenyard.interfaces.observer import Observer, ObserverContext
from tokenyard.interfaces.policy import PolicyContext, SchedulingPolicy
from tokenyard.interfaces.scheduler import Scheduler, SchedulerContext
from tokenyard.launch.cache_size import CacheSize, check_max_model_len, size_kv_cache
from tokenyard.model.files import resolve_model
from tokenyard.parts import make_part
from tokenyard.platform import Platform
from tokenyard.worker.attention_choice import AUTO, check_attention

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, ObserverConfig
    from tokenyard.model.files import ModelFiles
    from tokenyard.model.hub import Token

DescriptorT = TypeVar("DescriptorT", bound=Descriptor[object])
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
) -> RunningEngine:
    """Start the executor, load the model and put the parts together; nothing is left running when it raises.

    `hub_token` is for fetching a Hub id. It is no part of the config, which is printed: whatever is fetched is in the
    local cache before a worker looks for it.
    """
    check_before_fetching(config, catalogue)
    files = resolve_model(config.model.name, on_progress, revision=config.model.revision, token=hub_token)
    config = at_commit(config, files)
    check_max_model_len(config, files)
    clock = clock or MonotonicClock()
    policy = make_policy(config, catalogue)  # before the model is loaded: a mistake should not cost that time
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
            num_blocks=size.num_blocks + 1, block_size=config.kv_cache.block_size, max_model_len=size.max_model_len
        )
        _told(config, "allocate_kv_cache", lambda: executor.allocate_kv_cache(plan))
        parts = assemble_parts(
            config,
            catalogue,
            executor=decorate(executor),
            report=report,
            policy=policy,
            clock=clock,
            size=size,
            decorate=decorate,
        )
    except BaseException:
        executor.shutdown()
        raise
    return RunningEngine(
        core=parts.core,
        clock=clock,
        files=files,
        report=report,
        max_model_len=size.max_model_len,
        num_blocks=size.num_blocks,
        metadata_type=metadata_type(config, catalogue),
    )


def check_before_fetching(config: EngineConfig, catalogue: Catalogue) -> None:
    """Raise PluginError for what cannot run here whatever the model: it might be fetched for nothing."""
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
    policy: SchedulingPolicy | None,
    clock: Clock,
    size: CacheSize,
    decorate: Decorate = as_it_is,
) -> EngineParts:
    """Everything but the model: K/V cache manager, scheduler, observers and loop around a running executor."""
    observers = [_observer(row, catalogue, ObserverContext(seed=config.seed)) for row in config.observers]
    kv_context = KVCacheManagerContext(
        config=config.kv_cache,
        num_blocks=size.num_blocks,
        group_windows=tuple(group.sliding_window for group in report.kv_cache_groups),
        records_events=any(observer.wants_kv_events for observer in observers),
    )
    kv_cache_manager = decorate(
        make_part(
            chosen(catalogue, "kv_cache", config.kv_cache.name, KVCacheManagerDescriptor),
            KVCacheManager,
            lambda part: part.factory(config.kv_cache.options, kv_context),
        )
    )
    scheduler_context = SchedulerContext(
        config=config.scheduler,
        kv_cache_manager=kv_cache_manager,
        policy=None if policy is None else decorate(policy),
        clock=clock,
        max_model_len=size.max_model_len,
        vocab_size=report.vocab_size,
        block_size=config.kv_cache.block_size,
        prefix_caching=config.kv_cache.enable_prefix_caching,
        seed=config.seed,
        log_stats=config.engine.log_stats,
    )
    scheduler = decorate(
        make_part(
            chosen(catalogue, "scheduler", config.scheduler.name, SchedulerDescriptor),
            Scheduler,
            lambda part: part.factory(config.scheduler.options, scheduler_context),
        )
    )
    core_context = EngineCoreContext(
        scheduler=scheduler,
        executor=executor,
        clock=clock,
        observers=[decorate(observer) for observer in observers],
        log_stats=config.engine.log_stats,
    )
    core = make_part(
        chosen(catalogue, "engine", config.engine.name, EngineCoreDescriptor),
        EngineCore,
        lambda part: part.factory(config.engine.options, core_context),
    )
    return EngineParts(core=core, scheduler=scheduler, kv_cache_manager=kv_cache_manager, policy=policy)


def make_policy(config: EngineConfig, catalogue: Catalogue) -> SchedulingPolicy | None:
    """The policy that the config names, if its scheduler takes one."""
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


def metadata_type(config: EngineConfig, catalogue: Catalogue) -> type:
    """What users may tell the policy that the config names; NoOptions where there is none."""
    policy = config.scheduler.policy
    if policy is None:
        return NoOptions
    return chosen(catalogue, "policy", policy.name, PolicyDescriptor).metadata_type


def chosen(catalogue: Catalogue, kind: str, name: str, expected: type[DescriptorT]) -> DescriptorT:
    """The descriptor that the config names; raises PluginError when it cannot run here."""
    entry = catalogue.get(kind, name)
    if not isinstance(entry.descriptor, expected):
        raise PluginError(f"'{name}' is registered as {kind} but described by {type(entry.descriptor).__name__}")
    if reasons := entry.unavailable_reasons(Platform()):
        raise PluginError(f"{kind} '{name}' cannot run here: {'; '.join(reasons)}")
    return entry.descriptor


def _observer(row: ObserverConfig, catalogue: Catalogue, context: ObserverContext) -> Observer:
    descriptor = chosen(catalogue, "observer", row.name, ObserverDescriptor)
    return make_part(descriptor, Observer, lambda part: part.factory(row.options, context))
