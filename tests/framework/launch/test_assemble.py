"""build_engine: what is checked before the model is loaded, and what is undone when a part fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenyard import ExecutorDescriptor, KVCacheManagerDescriptor, PolicyDescriptor, SchedulerDescriptor
from tokenyard.catalogue import Catalogue
from tokenyard.config import (
    AttentionConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    NoOptions,
    PolicyConfig,
    SchedulerConfig,
)
from tokenyard.errors import CapacityError, ConfigError, PluginError
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import PolicyContext, SchedulerContext, SchedulingPolicy
from tokenyard.launch.assemble import build_engine
from tokenyard.plugins import load_catalogue
from tokenyard.scheduler import BatchScheduler

CatalogueWith = Callable[..., Catalogue]


@pytest.fixture
def config(tiny_llama_dir: Path) -> EngineConfig:
    return EngineConfig(model=ModelConfig(name=str(tiny_llama_dir)), kv_cache=KVCacheConfig(num_blocks=8))


class WatchedExecutor(InProcessExecutor):
    """Remembers whether it was shut down."""

    running = 0

    def initialize(self, config: EngineConfig):  # type: ignore[no-untyped-def]
        type(self).running += 1
        return super().initialize(config)

    def shutdown(self) -> None:
        type(self).running -= 1
        super().shutdown()


def test_a_factory_that_raises_is_told_with_the_plugins_name_and_nothing_stays(
    config: EngineConfig, catalogue_with: CatalogueWith
) -> None:
    def broken(options: object, context: object) -> object:
        raise ZeroDivisionError("bug")

    WatchedExecutor.running = 0
    watched: ExecutorDescriptor[NoOptions] = ExecutorDescriptor(
        name="inproc", api_version=(1, 1), factory=lambda options, context: WatchedExecutor(context)
    )
    manager = KVCacheManagerDescriptor(name="paged", api_version=(1, 1), factory=broken)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="kv_cache 'paged' failed to start: ZeroDivisionError: bug"):
        build_engine(config, catalogue_with(watched, manager))
    assert WatchedExecutor.running == 0


def test_a_part_that_cannot_run_here_is_refused_with_its_reasons_before_the_model_is_loaded(
    config: EngineConfig, catalogue_with: CatalogueWith
) -> None:
    policy: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="fcfs",
        api_version=(1, 1),
        factory=lambda options, context: pytest.fail("not built"),
        requires=lambda platform: ["no moon", "no sun"],
    )
    watched: ExecutorDescriptor[NoOptions] = ExecutorDescriptor(
        name="inproc", api_version=(1, 1), factory=lambda options, context: pytest.fail("not started")
    )
    with pytest.raises(PluginError, match="policy 'fcfs' cannot run here: no moon; no sun"):
        build_engine(config, catalogue_with(policy, watched))


def test_a_policy_and_a_scheduler_are_told_the_seed_and_the_limits(
    config: EngineConfig, catalogue_with: CatalogueWith
) -> None:
    policies: list[PolicyContext] = []
    schedulers: list[SchedulerContext] = []

    def make_policy(options: object, context: PolicyContext) -> SchedulingPolicy:
        policies.append(context)
        return SchedulingPolicy()

    def make_scheduler(options: object, context: SchedulerContext) -> BatchScheduler:
        schedulers.append(context)
        return BatchScheduler(context)

    policy = PolicyDescriptor(name="fcfs", api_version=(1, 1), factory=make_policy)
    scheduler = SchedulerDescriptor(name="batch", api_version=(1, 1), factory=make_scheduler, takes_policy=True)
    seeded = dataclasses.replace(config, seed=17, scheduler=_two_at_once(max_num_batched_tokens=99))
    build_engine(seeded, catalogue_with(policy, scheduler)).core.shutdown()
    assert policies == [PolicyContext(seed=17, max_num_seqs=2, max_num_batched_tokens=99, max_chunk_tokens=99)]
    assert [(context.seed, context.config) for context in schedulers] == [(17, seeded.scheduler)]


def test_a_pool_from_memory_must_hold_the_longest_request(config: EngineConfig) -> None:
    small = dataclasses.replace(config, kv_cache=KVCacheConfig(memory="64KiB"))
    with pytest.raises(CapacityError, match=r"max_model_len=256 tokens needs 16; raise kv_cache\.memory"):
        build_engine(small, load_catalogue())
    fits = dataclasses.replace(small, model=dataclasses.replace(config.model, max_model_len=32))
    engine = build_engine(fits, load_catalogue())
    assert engine.num_blocks >= 2
    engine.core.shutdown()


def test_an_explicit_number_of_blocks_only_warns(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    build_engine(config, load_catalogue()).core.shutdown()
    assert "kv_cache.num_blocks=8 holds 128 tokens, below model.max_model_len=256" in caplog.text


def test_a_pool_is_no_larger_than_what_can_run_at_once(config: EngineConfig) -> None:
    roomy = dataclasses.replace(config, kv_cache=KVCacheConfig(memory="64MiB"), scheduler=_two_at_once())
    engine = build_engine(roomy, load_catalogue())
    assert engine.num_blocks == 2 * 16
    engine.core.shutdown()


def test_a_context_beyond_the_models_is_refused(config: EngineConfig) -> None:
    long = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=257))
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the 256"):
        build_engine(long, load_catalogue())


def _two_at_once(*, max_num_batched_tokens: int = 2048) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=max_num_batched_tokens, policy=PolicyConfig())


def test_an_attention_factory_that_fails_is_told_with_its_name(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenyard_backends.torch_native.backend import TorchNativeBackend

    def fail(self: TorchNativeBackend, context: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(TorchNativeBackend, "__init__", fail)
    named = dataclasses.replace(config, attention=AttentionConfig(name="torch_native"))
    with pytest.raises(PluginError, match="attention 'torch_native' failed to start: ZeroDivisionError: bug"):
        build_engine(named, load_catalogue())
