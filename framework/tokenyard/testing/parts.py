"""A catalogue with parts that are not installed, and an engine's parts without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.catalogue import Catalogue, Entry, Provider
from tokenyard.clock import VirtualClock
from tokenyard.config import EngineConfig
from tokenyard.descriptors import kind_of
from tokenyard.errors import ConfigError, ValidationError
from tokenyard.launch.assemble import Decorate, EngineParts, as_it_is, assemble_parts
from tokenyard.launch.cache_size import CacheSize, size_kv_cache
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.host_memory import host_blocks
from tokenyard.launch.steering import make_steering
from tokenyard.plugins import load_catalogue
from tokenyard.testing.inputs import checked_overrides
from tokenyard.testing.scripted import ScriptedExecutor
from tokenyard.testing.worker_side import WorkerLimits

if TYPE_CHECKING:
    from typing import Any

    from tokenyard.clock import Clock
    from tokenyard.descriptors import Descriptor
    from tokenyard.testing.inputs import StepSeconds

DEFAULT_NUM_BLOCKS = 10_000
DEFAULT_MAX_MODEL_LEN = 8192
MOST_HOST_BLOCKS = 1 << 24  # their content is kept, a number a token


def catalogue_with(*descriptors: Descriptor[Any], installed: Catalogue | None = None) -> Catalogue:
    """The installed plugins and these parts, each in the place of an installed one of its kind and name."""
    provider = Provider(distribution="under-test", version="0", entry_point="under_test")
    own = {(kind_of(descriptor), descriptor.name) for descriptor in descriptors}
    base = installed or load_catalogue()
    others = [entry for entry in base.entries() if (entry.kind, entry.name) not in own]
    return Catalogue(
        [*others, *(Entry(descriptor=descriptor, provider=provider) for descriptor in descriptors)],
        failures=base.failures,
        blocked=base.blocked,
        config_paths=base.config_paths,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedParts:
    """An engine around a ScriptedExecutor."""

    parts: EngineParts
    executor: ScriptedExecutor
    clock: Clock
    size: CacheSize
    config: EngineConfig


def config_and_catalogue(
    overrides: Sequence[str] | None, config: EngineConfig | None, catalogue: Catalogue | None
) -> tuple[EngineConfig, Catalogue]:
    """What a harness runs, from overrides or as a config, and what its parts are chosen from."""
    if config is None:
        return load_engine_config(checked_overrides(overrides), catalogue=catalogue)
    if overrides:
        raise ValidationError("give overrides or a config, not both", parameter="overrides", value=overrides)
    if not isinstance(config, EngineConfig):
        raise ValidationError(
            f"config is an EngineConfig, such as another harness's; got a {type(config).__name__}; give text as "
            "overrides",
            parameter="config",
            value=config,
        )
    return config, catalogue or load_catalogue(config.plugins)


def with_sizes(config: EngineConfig) -> EngineConfig:
    """The config with the sizes that a model would have given.

    A prompt must fit one step where prefill is not chunked, so there the greatest length is the budget at most.
    """
    if config.kv_cache.memory is not None:
        raise ConfigError(
            f"kv_cache.memory={config.kv_cache.memory}: no model is loaded, so nobody knows what a block costs; give "
            "kv_cache.num_blocks"
        )
    scheduler, max_model_len = config.scheduler, config.model.max_model_len
    if max_model_len is None:
        max_model_len = DEFAULT_MAX_MODEL_LEN
        if not scheduler.enable_chunked_prefill:
            max_model_len = min(max_model_len, scheduler.max_num_batched_tokens)
    num_blocks = config.kv_cache.num_blocks
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=max_model_len),
        kv_cache=dataclasses.replace(
            config.kv_cache, num_blocks=DEFAULT_NUM_BLOCKS if num_blocks is None else num_blocks
        ),
    )


def scripted_parts(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    vocab_size: int,
    group_windows: Sequence[int | None] = (None,),
    clock: Clock | None = None,
    step_seconds: StepSeconds = None,
    decorate: Decorate = as_it_is,
) -> ScriptedParts:
    """Everything but a model: the parts that the config names around a ScriptedExecutor."""
    clock = clock or VirtualClock()
    sized = with_sizes(config)
    limits = _worker_limits(sized, group_windows)
    executor = ScriptedExecutor(limits, vocab_size=vocab_size, clock=clock, step_seconds=step_seconds)
    report = executor.initialize(sized)
    # Without a limit of its own the config's blocks need not hold the longest request, and nobody wants to be warned.
    has_limit = config.model.max_model_len is not None
    most = sized.model.max_model_len or 0
    size = (
        size_kv_cache(sized, report, DEFAULT_MAX_MODEL_LEN)
        if has_limit
        else CacheSize(limits.num_blocks, most, limits.num_host_blocks)
    )
    parts = assemble_parts(
        sized,
        catalogue,
        executor=decorate(executor),
        report=report,
        steering=make_steering(sized, catalogue),
        clock=clock,
        size=size,
        decorate=decorate,
    )
    return ScriptedParts(parts=parts, executor=executor, clock=clock, size=size, config=sized)


def _worker_limits(config: EngineConfig, group_windows: Sequence[int | None]) -> WorkerLimits:
    return WorkerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        block_size=config.kv_cache.block_size,
        num_blocks=config.kv_cache.num_blocks or 0,
        group_windows=tuple(group_windows),
        num_host_blocks=_num_host_blocks(config),
    )


def _num_host_blocks(config: EngineConfig) -> int:
    count = host_blocks(config, config.kv_cache.block_size)  # as `ScriptedExecutor` reports: a byte a token
    if count > MOST_HOST_BLOCKS:
        raise ConfigError(
            f"kv_cache.host_memory={config.kv_cache.host_memory} is {count} blocks in a harness, where a token takes a "
            f"byte; give at most {MOST_HOST_BLOCKS * config.kv_cache.block_size} bytes ({MOST_HOST_BLOCKS} blocks)"
        )
    return count
