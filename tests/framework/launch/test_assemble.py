"""build_engine: what is checked before the model is loaded, and what is undone when a part fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tokenyard import ExecutorDescriptor, KVCacheManagerDescriptor, PolicyDescriptor
from tokenyard.catalogue import Catalogue, Entry, Provider
from tokenyard.config import EngineConfig, KVCacheConfig, ModelConfig, PolicyConfig, SchedulerConfig
from tokenyard.descriptors import Descriptor
from tokenyard.errors import CapacityError, ConfigError, PluginError
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.launch.assemble import build_engine
from tokenyard.plugins import load_catalogue


def catalogue_with(*descriptors: Descriptor[object]) -> Catalogue:
    provider = Provider(distribution="third-party", version="1", entry_point="third")
    names = {(descriptor.kind, descriptor.name) for descriptor in descriptors}
    own = [entry for entry in load_catalogue().entries() if (entry.kind, entry.name) not in names]
    return Catalogue([*own, *(Entry(descriptor=descriptor, provider=provider) for descriptor in descriptors)])


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


def test_a_factory_that_raises_is_told_with_the_plugins_name_and_nothing_stays(config: EngineConfig) -> None:
    def broken(options: object, context: object) -> object:
        raise ZeroDivisionError("bug")

    WatchedExecutor.running = 0
    watched = ExecutorDescriptor(
        name="inproc", api_version=(1, 1), factory=lambda options, context: WatchedExecutor(context)
    )
    manager = KVCacheManagerDescriptor(name="paged", api_version=(1, 1), factory=broken)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="kv_cache 'paged' failed to start: ZeroDivisionError: bug"):
        build_engine(config, catalogue_with(watched, manager))  # type: ignore[list-item]
    assert WatchedExecutor.running == 0


def test_a_part_that_cannot_run_here_is_refused_with_its_reasons_before_the_model_is_loaded(
    config: EngineConfig,
) -> None:
    policy = PolicyDescriptor(
        name="fcfs",
        api_version=(1, 1),
        factory=lambda options, context: pytest.fail("not built"),
        requires=lambda platform: ["no moon", "no sun"],
    )
    watched = ExecutorDescriptor(
        name="inproc", api_version=(1, 1), factory=lambda options, context: pytest.fail("not started")
    )
    with pytest.raises(PluginError, match="policy 'fcfs' cannot run here: no moon; no sun"):
        build_engine(config, catalogue_with(policy, watched))  # type: ignore[list-item]


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


def _two_at_once() -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=2, policy=PolicyConfig())
